/* A bias of pairs that is made of a few terms where it is read, so that nothing of tokens by keys is kept.
 *
 *     x_tj = sum_r s_tr table_r[n_t, place_j] + s_tR |place_t - place_j| / max(1, n_t)       (9.33)
 *     bias = clip((x - m) / d, +-limit) scale                                                (9.34)
 *
 * Shapes: B rows, T tokens that read, J keys, N terms, the last of which may be the distance.
 */

#ifndef RECBFT_TERMS_H
#define RECBFT_TERMS_H

#include "vectors.h"

#define STRETCH 64 /* keys at a time */

typedef struct {
    const float *shares;        /* s, (B, T, N) */
    const float *table;         /* (tables, length, length) */
    const int32_t *reach;       /* n, (B, T) */
    int64_t num, tables, length; /* N; N, or one less where there is a distance */
    float mean, sharpness, limit, scale; /* of (9.34); 1 / d */
    float *d_shares, *d_scale;  /* (B, H, T, N), (B, H, T) */
} Terms;

/* The keys that one token reads. */
typedef struct {
    int64_t token;
    int32_t here;
    const int32_t *place; /* of the first of them */
    int64_t count;
    int in_step; /* places go up by one */
} Reads;

INLINE Reads reads_of(int64_t token, int32_t here, const int32_t *place, int64_t count)
{
    int32_t off = 0;
    for (int32_t j = 0; j < (int32_t)count; j++)
        off |= place[j] - place[0] - j;
    return (Reads){token, here, place, count, !off};
}

/* Term r of some keys from `from` on, in whole vectors whose rest is any number, in the table or in `room`. */
INLINE const float *term_of(const Terms *terms, int64_t r, const Reads *reads, int64_t from, int64_t count, float *room)
{
    const int32_t *place = reads->place + from;
    const int64_t n = terms->reach[reads->token], length = terms->length;
    if (r < terms->tables) {
        const float *row = terms->table + (r * length + n) * length;
        const float *end = terms->table + terms->tables * length * length;
        if (reads->in_step && row + place[0] + padded(count) <= end)
            return row + place[0];
        memset(room, 0, STRETCH * sizeof(float));
        for (int64_t j = 0; j < count; j++)
            room[j] = row[place[j]];
        return room;
    }
    const float unit = 1.0f / (float)most(1, n);
    memset(room, 0, STRETCH * sizeof(float));
    for (int64_t j = 0; j < count; j++)
        room[j] = unit * (float)abs(place[j] - reads->here);
    return room;
}

/* (9.34) of some keys before the scale, in whole vectors whose rest is any number. */
INLINE void standardised(const Terms *terms, const Reads *reads, int64_t from, int64_t count, float *x)
{
    const float limit = terms->limit, *shares = terms->shares + reads->token * terms->num;
    const int64_t wide = padded(count);
    float room[STRETCH];
    for (int64_t j = 0; j < wide; j++)
        x[j] = -terms->mean;
    for (int64_t r = 0; r < terms->num; r++) {
        const float *term = term_of(terms, r, reads, from, count, room);
        for (int64_t j = 0; j < wide; j++)
            x[j] += shares[r] * term[j];
    }
    for (int64_t j = 0; j < wide; j++) {
        float z = x[j] * terms->sharpness;
        z = z > limit ? limit : z;
        x[j] = z < -limit ? -limit : z;
    }
}

/* Add (9.34) to the logits of a token's keys. */
INLINE void add_terms(const Terms *terms, Reads reads, float *row)
{
    float x[STRETCH];
    for (int64_t from = 0; from < reads.count; from += STRETCH) {
        const int64_t count = least(STRETCH, reads.count - from);
        standardised(terms, &reads, from, count, x);
        for (int64_t j = 0; j < count; j++)
            row[from + j] += x[j] * terms->scale;
    }
}

/* The gradients of a token's shares and of the scale, of one head, from those of its logits. */
INLINE void keep_terms(const Terms *terms, Reads reads, int64_t own, const float *row)
{
    float x[STRETCH], d[STRETCH], room[STRETCH], d_scale = 0, *d_shares = terms->d_shares + own * terms->num;
    memset(d_shares, 0, terms->num * sizeof(float));
    for (int64_t from = 0; from < reads.count; from += STRETCH) {
        const int64_t count = least(STRETCH, reads.count - from), wide = padded(count);
        memset(d, 0, sizeof d);
        memcpy(d, row + from, count * sizeof(float));
        standardised(terms, &reads, from, count, x);
#pragma omp simd reduction(+ : d_scale)
        for (int64_t j = 0; j < wide; j++) {
            d_scale += d[j] * x[j];
            d[j] = x[j] > -terms->limit && x[j] < terms->limit ? d[j] : 0;
        }
        for (int64_t r = 0; r < terms->num; r++) {
            const float *term = term_of(terms, r, &reads, from, count, room);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < wide; j++)
                sum += d[j] * term[j];
            d_shares[r] += sum;
        }
    }
    for (int64_t r = 0; r < terms->num; r++)
        d_shares[r] *= terms->scale * terms->sharpness;
    terms->d_scale[own] = d_scale;
}

#endif
