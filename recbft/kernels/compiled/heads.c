#include "heads.h"

/* Of each token, the columns from the first to the last that it may read, and how many of these it may not. */
void spans_of_tokens(int64_t B, int64_t T, int64_t J, int64_t causal, const int32_t *token_history,
                   const int32_t *token_place, const int32_t *key_history, const int32_t *key_place, int32_t *start,
                   int32_t *stop, int32_t *gaps)
{
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = b * T; t < (b + 1) * T; t++) {
            const int32_t *history = key_history + b * J, *place = key_place + b * J;
            const int32_t own = token_history[t], here = token_place[t];
            int32_t low = INT32_MAX, high = 0, count = 0;
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : count)
            for (int32_t j = 0; j < (int32_t)J; j++) {
                int reads = own >= 0 && history[j] == own && (!causal || place[j] <= here);
                low = reads && j < low ? j : low;
                high = reads && j + 1 > high ? j + 1 : high;
                count += reads;
            }
            start[t] = count ? low : 0;
            stop[t] = high;
            gaps[t] = high - start[t] - count;
        }
}
