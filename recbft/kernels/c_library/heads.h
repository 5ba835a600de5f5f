/* What the kernels of attention share: heads of a packed batch, and which token may read which keys.
 *
 * Shapes: B rows, H heads, T tokens that read, J keys, K head width.
 */

#ifndef RECBFT_HEADS_H
#define RECBFT_HEADS_H

#include "terms.h"

#define BLOCK 64 /* tokens whose weights are kept at a time */

typedef struct { /* (B, H, tokens, K); the last stride is 1 */
    float *data;
    int64_t row, head, token;
} HeadView;

typedef struct { /* a bias per pair, (B, H, T, J), and its gradient; either may be NULL, and strides 0 */
    const float *data;
    int64_t row, head, token;
    float *gradient;    /* of every row and head, side by side */
    const Terms *terms; /* or NULL */
} PairBias;

typedef struct {
    int64_t B, H, T, J, K;
    const int32_t *start, *stop; /* (B, T) the keys from the first to the last that a token may read */
    const int32_t *gaps;         /* (B, T) how many of these it may not read */
    const int32_t *first;        /* (B, J) the column of the first token of the key's history */
    const int32_t *token_history, *token_place, *key_history, *key_place; /* (B, T) and (B, J) */
    int64_t causal;
} Packing;

INLINE float *at(HeadView view, int64_t b, int64_t h) { return view.data + b * view.row + h * view.head; }

#define LINE 16 /* floats of what a cache holds as one */

/* Have the K elements of a token brought near that are read with the next head, which is the thread's next. */
INLINE void ask_for(HeadView view, int64_t H, int64_t b, int64_t h, int64_t t, int64_t K)
{
    const float *next = h + 1 < H ? at(view, b, h + 1) : at(view, b + 1, 0);
    for (int64_t i = 0; i < K; i += LINE)
        __builtin_prefetch(next + t * view.token + i, 0, 2);
}

/* The same of tokens of this head that are written soon. */
INLINE void make_room(HeadView view, int64_t b, int64_t h, int64_t from, int64_t count, int64_t K)
{
    float *to = at(view, b, h) + from * view.token;
    for (int64_t t = 0; t < count; t++, to += view.token)
        for (int64_t i = 0; i < K; i += LINE)
            __builtin_prefetch(to + i, 1, 3);
}

/* The K elements of each token of a head, scaled, in `rows` of `width` whose rest is 0. */
INLINE void fetch_rows(const Packing *of, HeadView view, int64_t b, int64_t h, int64_t tokens, float scale, float *to,
                       int64_t rows, int64_t width)
{
    const int64_t K = of->K, H = of->H;
    const float *from = at(view, b, h);
    for (int64_t t = 0; t < tokens; t++, from += view.token, to += width) {
        ask_for(view, H, b, h, t, K);
        for (int64_t i = 0; i < K; i++)
            to[i] = from[i] * scale;
        for (int64_t i = K; i < width; i++)
            to[i] = 0;
    }
    memset(to, 0, (rows - tokens) * width * sizeof(float));
}

/* Write the K elements of some tokens of a head, scaled, from rows of `width`. */
INLINE void put_rows(const Packing *of, HeadView view, int64_t b, int64_t h, int64_t from, int64_t count, float scale,
                     const float *rows, int64_t width)
{
    const int64_t K = of->K;
    float *to = at(view, b, h) + from * view.token;
    for (int64_t t = 0; t < count; t++, to += view.token, rows += width)
#pragma omp simd
        for (int64_t i = 0; i < K; i++)
            to[i] = rows[i] * scale;
}

/* Set what a tile leaves out of a row of its block to 0. */
INLINE void blank_rest(float *row, int64_t before, int64_t width, int64_t after)
{
    for (int64_t j = 0; j < before; j++)
        row[j] = 0;
    for (int64_t j = before + width; j < before + width + after; j++)
        row[j] = 0;
}

INLINE int32_t lag(const Packing *of, int64_t b, int64_t token, int64_t j)
{
    return abs(of->key_place[b * of->J + j] - of->token_place[token]);
}

/* Of a key within the span of a token that has gaps; tokens are counted through the rows. */
INLINE int may_read(const Packing *of, int64_t b, int64_t token, int64_t j)
{
    const int64_t key = b * of->J + j;
    return of->key_history[key] == of->token_history[token] &&
           (!of->causal || of->key_place[key] <= of->token_place[token]);
}

INLINE int reads_any(const Packing *of, int64_t b, int64_t t)
{
    return of->start[b * of->T + t] < of->stop[b * of->T + t];
}

/* What a token reads of keys within its span. */
INLINE Reads reads_in_span(const Packing *of, int64_t b, int64_t t)
{
    const int64_t token = b * of->T + t, start = of->start[token];
    return reads_of(token, of->token_place[token], of->key_place + b * of->J + start, most(0, of->stop[token] - start));
}

/* A few neighbouring tokens and the keys, in whole vectors, that any of them may read; these are the `depth` keys from
 * low + skip, the others only fill up the vectors. */
typedef struct {
    int64_t from, count, low, width, skip, depth;
} Tile;

INLINE Tile tile_of(const Packing *of, int64_t b, int64_t from, int64_t end)
{
    int64_t low = of->J, high = 0;
    for (int64_t t = from; t < end; t++) {
        if (reads_any(of, b, t))
            low = least(low, of->start[b * of->T + t]), high = most(high, of->stop[b * of->T + t]);
    }
    if (low >= high)
        return (Tile){from, end - from, 0, 0, 0, 0};
    const int64_t whole = low / LANES * LANES;
    return (Tile){from, end - from, whole, padded(high - whole), low - whole, high - low};
}

/* What is added to the products of queries and keys, and the gradients of it; any may be NULL. */
typedef struct {
    const float *key;       /* (B, J) */
    const float *lag;       /* (L), the last for all lags that are longer */
    const float *log_decay; /* (B): per step of the lag */
    int64_t L;
    PairBias pairs;
    float *d_key, *d_lag, *d_log_decay; /* (B, H, J), (B, H, L), (B, H, T) */
} Biases;

/* Set what a token may not read to `blank`. */
INLINE void blank_unread(const Packing *of, int64_t b, int64_t token, Tile tile, float blank, float *row)
{
    const int64_t start = of->start[token] - tile.low, stop = of->stop[token] - tile.low;
    for (int64_t j = 0; j < tile.width; j++)
        row[j] = j >= start && j < stop ? row[j] : blank;
    if (of->gaps[token])
        for (int64_t j = start; j < stop; j++)
            if (!may_read(of, b, token, tile.low + j))
                row[j] = blank;
}

/* Complete the products of a token, which become `blank` where it may not read. */
INLINE void add_biases(const Biases *biases, const Packing *of, int64_t b, int64_t h, int64_t t, Tile tile, float blank,
                       float *row)
{
    const int64_t token = b * of->T + t, start = of->start[token] - tile.low, stop = of->stop[token] - tile.low;
    const PairBias *pairs = &biases->pairs;
    if (pairs->terms)
        add_terms(pairs->terms, reads_in_span(of, b, t), row + start);
    if (pairs->data) {
        const float *own = pairs->data + b * pairs->row + h * pairs->head + t * pairs->token + tile.low;
        for (int64_t j = start; j < stop; j++)
            row[j] += own[j];
    }
    if (biases->lag)
        for (int64_t j = start; j < stop; j++)
            row[j] += biases->lag[least(lag(of, b, token, tile.low + j), biases->L - 1)];
    if (biases->log_decay) {
        const float decay = biases->log_decay[b];
        for (int64_t j = start; j < stop; j++)
            row[j] += decay * (float)lag(of, b, token, tile.low + j);
    }
    if (biases->key) {
        const float *key = biases->key + b * of->J + tile.low;
        for (int64_t j = start; j < stop; j++)
            row[j] += key[j];
    }
    blank_unread(of, b, token, tile, blank, row);
}

/* Begin the gradients that are sums over the tokens of a head. */
INLINE void begin_biases(const Biases *biases, const Packing *of, int64_t b, int64_t h)
{
    const int64_t head = b * of->H + h;
    if (biases->d_key)
        memset(biases->d_key + head * of->J, 0, of->J * sizeof(float));
    if (biases->d_lag)
        memset(biases->d_lag + head * biases->L, 0, biases->L * sizeof(float));
}

/* Take in the gradients of a token's logits, which are 0 where it may not read and outside of start to stop. */
INLINE void keep_biases(const Biases *biases, const Packing *of, int64_t b, int64_t h, int64_t t, Tile tile,
                        int64_t start, int64_t stop, const float *d)
{
    const int64_t token = b * of->T + t, head = b * of->H + h, own = head * of->T + t;
    const PairBias *pairs = &biases->pairs;
    if (pairs->terms && pairs->terms->d_shares)
        keep_terms(pairs->terms, reads_in_span(of, b, t), own, d + of->start[token] - tile.low);
    if (pairs->gradient) {
        float *d_pairs = pairs->gradient + own * of->J;
        memset(d_pairs, 0, of->J * sizeof(float));
        memcpy(d_pairs + tile.low, d, least(tile.width, of->J - tile.low) * sizeof(float));
    }
    if (biases->d_key) {
        float *d_key = biases->d_key + head * of->J + tile.low;
        for (int64_t j = start; j < stop; j++)
            d_key[j] += d[j];
    }
    if (biases->d_lag) {
        float *d_lag = biases->d_lag + head * biases->L;
        for (int64_t j = start; j < stop; j++)
            d_lag[least(lag(of, b, token, tile.low + j), biases->L - 1)] += d[j];
    }
    if (biases->d_log_decay) {
        float sum = 0;
        for (int64_t j = start; j < stop; j++)
            sum += d[j] * (float)lag(of, b, token, tile.low + j);
        biases->d_log_decay[own] = sum;
    }
}

/* exp(row - top) of a tile's rows in their place; before any sum of a row, for which the next would wait. */
INLINE void exponentials(float *rows, int64_t Jp, Tile tile, const float *top)
{
    for (int64_t r = 0; r < tile.count; r++) {
        float *row = rows + r * Jp;
#pragma omp simd
        for (int64_t j = 0; j < tile.width; j++)
            row[j] = exponential(row[j] - top[r]);
    }
}

/* sums (count, columns) = rows of a tile, in the places of its keys, times what the keys have. */
INLINE void over_keys(Tile tile, const float *rows, int64_t Jp, const float *keys, int64_t key_row, int64_t columns,
                      float *sums, int64_t sums_row)
{
    const float *read = keys + (tile.low + tile.skip) * key_row;
    product(0, tile.count, tile.depth, columns, rows + tile.skip, Jp, 1, read, key_row, sums, sums_row);
}

/* Of a block's rows, cut into tiles of TALL, those that may read a key, from the first tile to the last. */
INLINE Tile readers_of(const Tile *tiles, int64_t num, Tile block, int64_t key)
{
    int64_t first = num, last = 0;
    for (int64_t i = 0; i < num; i++) {
        const int64_t begin = tiles[i].low + tiles[i].skip;
        if (begin < key + TALL && key < begin + tiles[i].depth)
            first = least(first, i), last = i + 1;
    }
    return (Tile){first * TALL, most(0, least(last * TALL, block.count) - first * TALL), key, TALL, 0, TALL};
}

/* One allocation, cut into parts; NULL where there is no memory for it. */
INLINE void *allot(int num, const int64_t *sizes, float ***parts)
{
    int64_t size = 0;
    for (int i = 0; i < num; i++)
        size += padded(sizes[i]);
    void *all = NULL;
    if (posix_memalign(&all, 64, size * sizeof(float)))
        return NULL;
    float *next = all;
    for (int i = 0; i < num; next += padded(sizes[i++]))
        *parts[i] = next;
    return all;
}

typedef void (*ForwardStep)(void *room, const void *call, int64_t b, int64_t h, Tile tile);
typedef void (*TileStep)(void *room, const void *call, int64_t b, int64_t h, Tile tile, int64_t row, Tile block);
typedef void (*KeyStep)(void *room, const void *call, int64_t from, Tile readers, int64_t key, int64_t column);

/* The tokens of a head in tiles, without more. */
INLINE void each_tile(const Packing *of, int64_t b, int64_t h, void *room, const void *call, ForwardStep step)
{
    for (int64_t from = 0; from < of->T; from += TALL)
        step(room, call, b, h, tile_of(of, b, from, least(from + TALL, of->T)));
}

/* The tokens of a head in blocks: tile by tile, then TALL keys at a time against those that may read them. */
INLINE void each_block(const Packing *of, int64_t b, int64_t h, void *room, const void *call, TileStep step, KeyStep keys)
{
    for (int64_t from = 0; from < of->T; from += BLOCK) {
        Tile block = tile_of(of, b, from, least(from + BLOCK, of->T)), tiles[BLOCK / TALL];
        int64_t num = 0;
        for (int64_t row = 0; row < block.count; row += TALL) {
            Tile tile = tile_of(of, b, from + row, from + least(row + TALL, block.count));
            if (!tile.width)
                tile.low = block.low;
            tiles[num++] = tile;
            step(room, call, b, h, tile, row, block);
        }
        for (int64_t j = 0; j < block.width; j += TALL) {
            const Tile readers = readers_of(tiles, num, block, block.low + j);
            if (readers.count)
                keys(room, call, from, readers, block.low + j, j);
        }
    }
}

/* What a mechanism does on a head, in the room of a thread; `take` gives what is to be freed, or NULL. */
typedef struct {
    void *(*take)(void *room, const void *call, int backward);
    void (*fetch)(void *room, const void *call, int64_t b, int64_t h, int backward);
    ForwardStep forward; /* of a tile */
    void (*backward)(void *room, const void *call, int64_t b, int64_t h);
} Mechanism;

#define ROOM_BYTES 512 /* of the pointers of any mechanism */

/* All heads, each by one thread; 0, or 1 where memory is short. */
INLINE int each_head(const Mechanism *mechanism, const Packing *of, const void *call, int backward)
{
    int failed = 0;
#pragma omp parallel
    {
        _Alignas(64) char room[ROOM_BYTES];
        void *taken = mechanism->take(room, call, backward);
        if (!taken) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < of->B * of->H; i++) {
            const int64_t b = i / of->H, h = i % of->H;
            if (!taken)
                continue;
            mechanism->fetch(room, call, b, h, backward);
            if (backward)
                mechanism->backward(room, call, b, h);
            else
                each_tile(of, b, h, room, call, mechanism->forward);
        }
        free(taken);
    }
    return failed;
}

#endif
