/* Exponentials of a block of logits in their place, and their sums: of each row
 *
 *     m = its largest, or 0 where no shift is asked for       x <- exp(x - m)       total = sum x           (a)
 *
 * To a few of them something is added before, and their share of the total is kept:
 *
 *     x[i] <- x[i] + a_k       p_k = exp(x[i] - m) / total       for each pair k of this row and an item i   (b)
 */

#include "vectors.h"

#define SUMMED 1024 /* in single precision; such sums are added up in double */

/* In the order of their positions, the block's first of which is `first`. */
struct pairs {
    int64_t count, first;
    const int64_t *position, *item;
    const float *added;
    float *share;
};

/* The first pair of a position or of a later one. */
static int64_t first_pair(const struct pairs *pairs, int64_t position)
{
    int64_t from = 0, to = pairs->count;
    while (from < to) {
        const int64_t middle = (from + to) / 2;
        if (pairs->position[middle] < position)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

void exponential_sums(int64_t rows, int64_t columns, int64_t row, float *x, float *shift, float *total,
                      const struct pairs *pairs)
{
#pragma omp parallel for schedule(static) if (rows * columns > 32768)
    for (int64_t r = 0; r < rows; r++) {
        float *own = x + r * row, top = 0;
        const int64_t begin = pairs ? first_pair(pairs, pairs->first + r) : 0;
        const int64_t finish = pairs ? first_pair(pairs, pairs->first + r + 1) : 0;
        for (int64_t k = begin; k < finish; k++)
            own[pairs->item[k]] += pairs->added[k];
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
        for (int64_t k = begin; k < finish; k++)
            pairs->share[k] = own[pairs->item[k]] / total[r];
    }
}
