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

/* A bias of terms before it is standardised, over the pairs of every few rows: how many these are, and the sums of
 * x - m and of its square; (B, 3), 0 for rows that are left out. */
void statistics_of_terms(const Packing *of, const Terms *terms, int64_t every, double *sums)
{
    Terms plain = *terms;
    plain.sharpness = 1, plain.limit = INFINITY;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < of->B; b++) {
        double pairs = 0, total = 0, squares = 0;
        for (int64_t t = 0; t < of->T && b % every == 0; t++) {
            const Reads reads = reads_in_span(of, b, t);
            const int64_t start = of->start[reads.token], gaps = of->gaps[reads.token];
            for (int64_t from = 0; from < reads.count; from += STRETCH) {
                const int64_t count = least(STRETCH, reads.count - from);
                float x[STRETCH], sum = 0, square = 0, num = 0;
                standardised(&plain, &reads, from, count, x);
                for (int64_t j = 0; j < count; j++) {
                    const float off = x[j];
                    const float counts = !gaps || may_read(of, b, reads.token, start + from + j) ? 1 : 0;
                    num += counts;
                    sum += counts * off;
                    square += counts * off * off;
                }
                pairs += num, total += sum, squares += square;
            }
        }
        sums[3 * b] = pairs, sums[3 * b + 1] = total, sums[3 * b + 2] = squares;
    }
}
