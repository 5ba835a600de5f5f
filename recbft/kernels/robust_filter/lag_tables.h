/* What depends on the lag alone, by the place of a key beside the token's own, on both sides of it: of keys that stand
 * one after another it stands side by side then, and so do the sums of its gradients.
 *
 * Shapes: L lags, TABLES tables, Jp keys in whole vectors.
 */

#ifndef RECBFT_LAG_TABLES_H
#define RECBFT_LAG_TABLES_H

#include "heads.h"

enum { DECAY, PRECISION, SHARPNESS, TABLES }; /* E, log P, s */

typedef struct {
    int64_t L, Jp, width;          /* of a table: 2 L - 1, and Jp on both sides, where a tile may reach beyond */
    float *values, *sums;          /* (TABLES, width) */
    int32_t *in_order;             /* (Jp): how many keys from this one on stand one after another */
    float *picked;                 /* (TALL, TABLES, Jp): of the keys of a token that do not */
    const float *of[TALL][TABLES]; /* the tables of each token of a tile, by its keys */
    int64_t place[TALL];           /* of its first key in them, or -1 where they are picked */
} LagTables;

INLINE int64_t width_of_table(int64_t L, int64_t Jp) { return padded(2 * L - 1 + 2 * Jp); }

/* Where a token's own place is in each table. */
INLINE int64_t centre(const LagTables *tables) { return tables->Jp + tables->L - 1; }

/* Lay out the tables of a head, (L) each, of which the first is given by its log. */
static void lay_tables(LagTables *tables, const Packing *of, int64_t b, const float *const *by_lag)
{
    const int32_t *place = of->key_place + b * of->J;
    memset(tables->values, 0, TABLES * tables->width * sizeof(float));
    for (int i = 0; i < TABLES; i++) {
        float *own = tables->values + i * tables->width + centre(tables);
        for (int64_t l = 0; l < tables->L; l++)
            own[l] = own[-l] = i == DECAY ? exponential(by_lag[i][l]) : by_lag[i][l];
    }
    for (int64_t j = of->J - 1; j >= 0; j--)
        tables->in_order[j] = j + 1 < of->J && place[j + 1] == place[j] + 1 ? tables->in_order[j + 1] + 1 : 1;
}

/* Where the first key of a token's tile stands in a table, if its keys stand one after another; or -1. */
INLINE int64_t place_in_table(const LagTables *tables, const Packing *of, int64_t b, int64_t t, Tile tile)
{
    const int64_t token = b * of->T + t, start = of->start[token], count = of->stop[token] - start;
    if (count <= 0 || tables->in_order[start] < count)
        return -1;
    const int64_t away = of->key_place[b * of->J + start] - of->token_place[token];
    return away > -tables->L && away + count <= tables->L ? centre(tables) + away - (start - tile.low) : -1;
}

/* The place of a key in a table; longer lags lie in gaps. */
INLINE int64_t place_of_key(const LagTables *tables, const Packing *of, int64_t b, int64_t token, int64_t key)
{
    return centre(tables) + least(lag(of, b, token, key), tables->L - 1);
}

/* The tables of the keys of a token, the r-th of its tile. */
static void find_tables(LagTables *tables, const Packing *of, int64_t b, int64_t t, Tile tile, int64_t r)
{
    const int64_t token = b * of->T + t, place = tables->place[r] = place_in_table(tables, of, b, t, tile);
    for (int i = 0; i < TABLES; i++) {
        const float *table = tables->values + i * tables->width;
        float *picked = tables->picked + (r * TABLES + i) * tables->Jp;
        tables->of[r][i] = place < 0 ? picked : table + place;
        if (place >= 0)
            continue;
        memset(picked, 0, tile.width * sizeof(float));
        for (int64_t j = of->start[token]; j < of->stop[token]; j++)
            picked[j - tile.low] = table[place_of_key(tables, of, b, token, j)];
    }
}

/* Add what a token gives to the tables that were found for it, 0 for keys that it does not read. */
static void add_to_tables(LagTables *tables, const Packing *of, int64_t b, int64_t t, Tile tile, int64_t r,
                          const float *const *given)
{
    const int64_t token = b * of->T + t, place = tables->place[r];
    for (int i = 0; i < TABLES; i++) {
        const float *x = given[i];
        float *sums = tables->sums + i * tables->width;
        if (place >= 0) {
#pragma omp simd
            for (int64_t j = 0; j < tile.width; j++)
                sums[place + j] += x[j];
        } else {
            for (int64_t j = of->start[token]; j < of->stop[token]; j++)
                sums[place_of_key(tables, of, b, token, j)] += x[j - tile.low];
        }
    }
}

/* The sums of a head by lag, those of both sides of a token together. */
static void sum_tables(const LagTables *tables, float *const *by_lag)
{
    for (int i = 0; i < TABLES; i++) {
        const float *sums = tables->sums + i * tables->width + centre(tables);
        for (int64_t l = 0; l < tables->L; l++)
            by_lag[i][l] = l ? sums[l] + sums[-l] : sums[l];
    }
}

#endif
