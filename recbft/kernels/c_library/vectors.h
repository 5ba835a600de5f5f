/* What the compiled paths share: vectors, a product of small matrices, and exp.
 *
 * A matrix is a pointer to float and the distance of its rows. Widths are padded to whole vectors, with zeros.
 */

#ifndef RECBFT_VECTORS_H
#define RECBFT_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define TALL 8 /* rows of a product at a time: two vectors of each stay in registers */
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define TALL 4
#else
#define VECTOR_BYTES 16
#define TALL 4
#endif
#define LANES (VECTOR_BYTES / 4)
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t places __attribute__((vector_size(VECTOR_BYTES)));

INLINE vector load(const float *from)
{
    vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, vector x) { memcpy(to, &x, sizeof x); }

INLINE int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* c (R, wide * LANES) = a b, or += where `add`; a[r, p] stands at a[r * a_row + p * a_column]. */
INLINE void product_tile(const int R, const int wide, const int add, const float *a, int64_t a_row, int64_t a_column,
                         int64_t depth, const float *b, int64_t b_row, float *c, int64_t c_row)
{
    vector sums[TALL][2];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < wide; w++)
            sums[r][w] = add ? load(c + r * c_row + w * LANES) : (vector){0};
    for (int64_t p = 0; p < depth; p++) {
        vector right[2];
        for (int w = 0; w < wide; w++)
            right[w] = load(b + p * b_row + w * LANES);
        for (int r = 0; r < R; r++)
            for (int w = 0; w < wide; w++)
                sums[r][w] += a[r * a_row + p * a_column] * right[w];
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < wide; w++)
            store(c + r * c_row + w * LANES, sums[r][w]);
}

INLINE void product_rows(const int R, const int add, const float *a, int64_t a_row, int64_t a_column, int64_t depth,
                         const float *b, int64_t b_row, float *c, int64_t c_row, int64_t columns)
{
    int64_t n = 0;
    for (; n + 2 * LANES <= columns; n += 2 * LANES)
        product_tile(R, 2, add, a, a_row, a_column, depth, b + n, b_row, c + n, c_row);
    if (n < columns)
        product_tile(R, 1, add, a, a_row, a_column, depth, b + n, b_row, c + n, c_row);
}

/* c (rows, columns) = a (rows, depth) b (depth, columns), or += where `add`; columns in whole vectors. */
INLINE void product(const int add, int64_t rows, int64_t depth, int64_t columns, const float *a, int64_t a_row,
                    int64_t a_column, const float *b, int64_t b_row, float *c, int64_t c_row)
{
    for (; rows >= TALL; rows -= TALL, a += TALL * a_row, c += TALL * c_row)
        product_rows(TALL, add, a, a_row, a_column, depth, b, b_row, c, c_row, columns);
    for (; rows >= 2; rows -= 2, a += 2 * a_row, c += 2 * c_row)
        product_rows(2, add, a, a_row, a_column, depth, b, b_row, c, c_row, columns);
    if (rows)
        product_rows(1, add, a, a_row, a_column, depth, b, b_row, c, c_row, columns);
}

/* For a transposition: lane l of what two vectors exchange, of whose lanes the second's follow the first's. */
#define EVEN(l, step) ((l) & (step) ? LANES + (l) - (step) : (l))
#define ODD(l, step) ((l) & (step) ? LANES + (l) : (l) + (step))
#define FOUR(which, l, step) which(l, step), which(l + 1, step), which(l + 2, step), which(l + 3, step)
#if LANES == 16
#define EACH(which, step) FOUR(which, 0, step), FOUR(which, 4, step), FOUR(which, 8, step), FOUR(which, 12, step)
#elif LANES == 8
#define EACH(which, step) FOUR(which, 0, step), FOUR(which, 4, step)
#else
#define EACH(which, step) FOUR(which, 0, step)
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, which, step) __builtin_shufflevector(a, b, EACH(which, step))
#else
#define SHUFFLE(a, b, which, step) __builtin_shuffle(a, b, (places){EACH(which, step)})
#endif
#define EXCHANGE(block, step)                                                                   \
    for (int i = 0; i < LANES; i++)                                                             \
        if (!(i & (step))) {                                                                    \
            vector a = block[i], b = block[i + (step)];                                         \
            block[i] = SHUFFLE(a, b, EVEN, step);                                               \
            block[i + (step)] = SHUFFLE(a, b, ODD, step);                                       \
        }

/* to (columns, rows) = from (rows, columns) transposed; both in whole vectors. */
INLINE void transpose(const float *from, int64_t rows, int64_t columns, float *to)
{
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < columns; c += LANES) {
            vector block[LANES];
            for (int i = 0; i < LANES; i++)
                block[i] = load(from + (r + i) * columns + c);
            EXCHANGE(block, 1)
            EXCHANGE(block, 2)
#if LANES > 4
            EXCHANGE(block, 4)
#endif
#if LANES > 8
            EXCHANGE(block, 8)
#endif
            for (int i = 0; i < LANES; i++)
                store(to + (c + i) * rows + r, block[i]);
        }
}

/* Over whole vectors, whose lanes meet by halves: the compiler, which may not change the order of a sum, would take one
 * lane after another. */
#define TURN(l, step) (((l) + (step)) % LANES)
#define TURNED(x, step) SHUFFLE(x, x, TURN, step)

#if LANES == 16
#define HALVES(MEET) MEET(8) MEET(4) MEET(2) MEET(1)
#elif LANES == 8
#define HALVES(MEET) MEET(4) MEET(2) MEET(1)
#else
#define HALVES(MEET) MEET(2) MEET(1)
#endif

INLINE float sum_of_lanes(vector x)
{
#define ADD(step) x += TURNED(x, step);
    HALVES(ADD)
    return x[0];
}

INLINE vector larger(vector x, vector y)
{
    const places which = x > y;
    return (vector)(((places)x & which) | ((places)y & ~which));
}

INLINE float largest(const float *x, int64_t width)
{
    vector top = load(x);
    for (int64_t j = LANES; j < width; j += LANES)
        top = larger(load(x + j), top);
#define RISE(step) top = larger(TURNED(top, step), top);
    HALVES(RISE)
    return top[0];
}

INLINE float sum_of(const float *x, int64_t width)
{
    vector sum = {0};
    for (int64_t j = 0; j < width; j += LANES)
        sum += load(x + j);
    return sum_of_lanes(sum);
}

INLINE float dot(const float *x, const float *y, int64_t width)
{
    vector sum = {0};
    for (int64_t j = 0; j < width; j += LANES)
        sum += load(x + j) * load(y + j);
    return sum_of_lanes(sum);
}

/* exp, to 2 units in the last place; 0 below -87, infinite above 88, NaN for NaN. */
INLINE float exponential(float x)
{
    const float rounding = 12582912.0f; /* 1.5 * 2^23: adding it leaves a whole number in the last bits */
    const float rounded = x * 1.44269504088896f + rounding, whole = rounded - rounding;
    float r = x - whole * 0.693359375f + whole * 2.12194440054690e-4f; /* less whole * ln 2, in two parts */
    float y = 1.0f / 120 + r * (1.0f / 720 + r * (1.0f / 5040));
    y = 1.0f + r * (1.0f + r * (1.0f / 2 + r * (1.0f / 6 + r * (1.0f / 24 + r * y))));
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    y *= power;
    y = x > 88.0f ? INFINITY : y;
    return x < -87.0f ? 0.0f : y;
}

/* log(1 + x) for x >= 0, to 2 units in the last place; NaN for NaN and for what is infinite. */
INLINE float logarithm_of_one_more(float x)
{
    const float u = 1.0f + x;
    int32_t bits;
    memcpy(&bits, &u, sizeof bits);
    bits -= 0x3f3504f3; /* so that what is left of u lies between sqrt(1/2) and sqrt(2) */
    const float power = (float)(bits >> 23);
    bits = (bits & 0x7fffff) + 0x3f3504f3;
    float m;
    memcpy(&m, &bits, sizeof m);
    const float f = m - 1.0f, s = f / (2.0f + f), z = s * s;
    const float series = 2 * s * (1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9)))));
    return power * 0.693359375f + (series - power * 2.12194440054690e-4f + (x - (u - 1.0f)) / u);
}

#endif
