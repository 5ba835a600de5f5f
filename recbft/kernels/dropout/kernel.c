/* y = x / (1 - p) where the random bits of an element reach the least that keeps it, 0 elsewhere. */

#include "vectors.h"

void dropout(int64_t size, int32_t least_kept, float scale, const int16_t *bits, const float *x, float *y)
{
#pragma omp parallel for simd schedule(static) if (size > 32768)
    for (int64_t i = 0; i < size; i++)
        y[i] = bits[i] >= least_kept ? x[i] * scale : 0;
}
