/* Exponentials of a block of logits in their place, and their sums: of each row
 *
 *     m = its largest, or 0 where no shift is asked for       x <- exp(x - m)       total = sum x           (a)
 */

#include "vectors.h"

#define SUMMED 1024 /* in single precision; such sums are added up in double */

void exponential_sums(int64_t rows, int64_t columns, int64_t row, float *x, float *shift, float *total)
{
#pragma omp parallel for schedule(static) if (rows * columns > 32768)
    for (int64_t r = 0; r < rows; r++) {
        float *own = x + r * row, top = 0;
        if (shift) {
            top = own[0];
#pragma omp simd reduction(max : top)
            for (int64_t c = 0; c < columns; c++)
                top = own[c] > top ? own[c] : top;
            shift[r] = top;
        }
        double sum = 0;
        for (int64_t from = 0; from < columns; from += SUMMED) {
            const int64_t end = least(from + SUMMED, columns);
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t c = from; c < end; c++) {
                float odds = exponential(own[c] - top);
                own[c] = odds;
                part += odds;
            }
            sum += part;
        }
        total[r] = (float)sum;
    }
}
