/* SiLU moments of a packed batch, head by head in the cache: nothing of tokens by keys is kept.
 *
 *     s = q k' / sqrt(K) + bias of the key + bias of the lag + lag * log decay    a = s sigmoid(s) / N        (8.2, 8.3)
 *     e = sum a v    s1 = sum a    s2 = sum a^2    w1 = sum a^2 v    w2 = sum a^2 v^2                  (8.3, 8.6)
 *
 * and backwards, with g, g1, g2, h1 and h2 the gradients of (8.3, 8.6), as in silu_moments/torch.py,
 *
 *     dA = g v' + g1 + 2 a * (g2 + h1 v' + h2 (v^2)')        ds = silu'(s) * dA / N                           (a)
 *     dq = ds k / sqrt(K)    dk = ds' q / sqrt(K)    dv = a' g + (a^2)' h1 + 2 v * ((a^2)' h2)                (b)
 *
 * Shapes: B rows, H heads, T tokens that read, J keys, K head width, L lags.
 */

#include "heads.h"

typedef struct {
    Packing of;
    int64_t mean_alone;
    float scale, share; /* 1 / sqrt(K); 1 / N */
    HeadView q, k, v;
    Biases biases;
    HeadView mean, square_mean, square_second;
    float *weight_sum, *square_sum; /* (B, H, T) */
    HeadView grad_mean, grad_square_mean, grad_square_second;
    const float *grad_weight_sum, *grad_square_sum;
    HeadView d_q, d_k, d_v;
} SiluCall;

/* What a head is worked on with. */
typedef struct {
    int64_t Kp, Jp, Vp;                  /* K and J padded; width of the values beside their squares, or alone */
    float *q, *k_columns;                /* (T, Kp), (Kp, Jp) */
    float *k, *v, *v_columns;            /* (Jp, Kp), (Jp, Vp), (Vp, Jp) */
    float *weights, *squares, *d_scores; /* (BLOCK, Jp) */
    float *pull;                         /* (BLOCK, Kp + Vp): g beside h1 and h2 */
    float *sums;                         /* (TALL, Kp + Vp) */
    float *d_k, *d_v, *d_v_squares;      /* (Jp, Kp) twice, (Jp, Vp) */
} Room;

_Static_assert(sizeof(Room) <= ROOM_BYTES, "make ROOM_BYTES larger");

static void *take(void *given, const void *of_call, int backward)
{
    Room *room = given;
    const SiluCall *call = of_call;
    (void)backward;
    const int64_t Kp = padded(call->of.K), Jp = padded(call->of.J), Vp = call->mean_alone ? Kp : 2 * Kp;
    const int64_t sizes[] = {call->of.T * Kp, Kp * Jp, Jp * Kp, Jp * Vp, Vp * Jp, BLOCK * Jp, BLOCK * Jp, BLOCK * Jp,
                             BLOCK * (Kp + Vp), TALL * (Kp + Vp), Jp * Kp, Jp * Kp, Jp * Vp};
    float **parts[] = {&room->q, &room->k_columns, &room->k, &room->v, &room->v_columns, &room->weights, &room->squares,
                       &room->d_scores, &room->pull, &room->sums, &room->d_k, &room->d_v,
                       &room->d_v_squares};
    room->Kp = Kp, room->Jp = Jp, room->Vp = Vp;
    return allot(sizeof sizes / sizeof *sizes, sizes, parts);
}

/* Operands of a head, padded: q scaled, k, v beside v^2, and k and v by columns. */
static void fetch(void *given, const void *of_call, int64_t b, int64_t h, int backward)
{
    Room *room = given;
    const SiluCall *call = of_call;
    const int64_t K = call->of.K, J = call->of.J, Kp = room->Kp, Jp = room->Jp, Vp = room->Vp;
    fetch_rows(&call->of, call->q, b, h, call->of.T, call->scale, room->q, call->of.T, Kp);
    fetch_rows(&call->of, call->k, b, h, J, 1, room->k, Jp, Kp);
    fetch_rows(&call->of, call->v, b, h, J, 1, room->v, Jp, Vp);
    for (int64_t j = 0; j < J && !call->mean_alone; j++) {
        float *value = room->v + j * Vp;
        for (int64_t i = 0; i < K; i++)
            value[Kp + i] = value[i] * value[i];
    }
    transpose(room->k, Jp, Kp, room->k_columns);
    if (backward)
        transpose(room->v, Jp, Vp, room->v_columns);
}

INLINE float sigmoid(float s) { return 1 / (1 + exponential(-s)); }

static void forward_tile(void *given, const void *of_call, int64_t b, int64_t h, Tile tile)
{
    Room *room = given;
    const SiluCall *call = of_call;
    const int64_t K = call->of.K, Kp = room->Kp, Jp = room->Jp, Vp = room->Vp;
    float *weights = room->weights;
    make_room(call->mean, b, h, tile.from, tile.count, K);
    if (!call->mean_alone) {
        make_room(call->square_mean, b, h, tile.from, tile.count, K);
        make_room(call->square_second, b, h, tile.from, tile.count, K);
    }
    product(0, tile.count, K, tile.width, room->q + tile.from * Kp, Kp, 1, room->k_columns + tile.low, Jp, weights, Jp);
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t t = tile.from + r, own = (b * call->of.H + h) * call->of.T + t;
        float *row = weights + r * Jp, *square = room->squares + r * Jp;
        add_biases(&call->biases, &call->of, b, h, t, tile, 0, row); /* a score of 0 has a weight of 0 */
#pragma omp simd
        for (int64_t j = 0; j < tile.width; j++) {
            float a = row[j] * sigmoid(row[j]) * call->share;
            row[j] = a;
            square[j] = a * a;
        }
        if (!call->mean_alone) {
            call->weight_sum[own] = sum_of(row, tile.width);
            call->square_sum[own] = sum_of(square, tile.width);
        }
    }
    const int64_t wide = Kp + Vp;
    over_keys(tile, weights, Jp, room->v, Vp, Kp, room->sums, wide);
    if (!call->mean_alone)
        over_keys(tile, room->squares, Jp, room->v, Vp, Vp, room->sums + Kp, wide);
    put_rows(&call->of, call->mean, b, h, tile.from, tile.count, 1, room->sums, wide);
    if (call->mean_alone)
        return;
    put_rows(&call->of, call->square_mean, b, h, tile.from, tile.count, 1, room->sums + Kp, wide);
    put_rows(&call->of, call->square_second, b, h, tile.from, tile.count, 1, room->sums + 2 * Kp, wide);
}

/* a, a^2 and ds of a few tokens, in the rows that are theirs; dq of them, and what biases get. */
static void backward_tile(void *given, const void *of_call, int64_t b, int64_t h, Tile tile, int64_t row, Tile block)
{
    Room *room = given;
    const SiluCall *call = of_call;
    const Packing *of = &call->of;
    const int64_t K = of->K, Kp = room->Kp, Jp = room->Jp, Vp = room->Vp, wide = Kp + Vp;
    const int64_t before = tile.low - block.low, after = block.width - before - tile.width;
    float *kept[] = {room->weights + row * Jp, room->d_scores + row * Jp, room->squares + row * Jp};
    float *pull = room->pull + row * wide;
    make_room(call->d_q, b, h, tile.from, tile.count, K);
    memset(pull, 0, tile.count * wide * sizeof(float));
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t t = tile.from + r;
        const HeadView *views[] = {&call->grad_mean, &call->grad_square_mean, &call->grad_square_second};
        for (int i = 0; i < (call->mean_alone ? 1 : 3); i++) {
            ask_for(*views[i], of->H, b, h, t, K);
            memcpy(pull + r * wide + i * Kp, at(*views[i], b, h) + t * views[i]->token, K * sizeof(float));
        }
    }
    float *a = kept[0] + before, *d = kept[1] + before, *square = kept[2] + before;
    product(0, tile.count, K, tile.width, room->q + tile.from * Kp, Kp, 1, room->k_columns + tile.low, Jp, a, Jp);
    product(0, tile.count, K, tile.width, pull, wide, 1, room->v_columns + tile.low, Jp, d, Jp);
    if (!call->mean_alone)
        product(0, tile.count, Vp, tile.width, pull + Kp, wide, 1, room->v_columns + tile.low, Jp, square, Jp);
    for (int64_t r = 0; r < tile.count; r++, a += Jp, d += Jp, square += Jp) {
        const int64_t t = tile.from + r, token = b * of->T + t, own = (b * of->H + h) * of->T + t;
        const float g1 = call->mean_alone ? 0 : call->grad_weight_sum[own];
        const float g2 = call->mean_alone ? 0 : call->grad_square_sum[own], share = call->share;
        for (int i = 0; i < 3; i++)
            blank_rest(kept[i] + r * Jp, before, tile.width, after);
        add_biases(&call->biases, of, b, h, t, tile, 0, a);
        for (int64_t j = 0; j < tile.width; j++) {
            const float s = a[j], gate = sigmoid(s), weight = s * gate * share;
            const float more = call->mean_alone ? 0 : 2 * weight * (g2 + square[j]);
            a[j] = weight;
            square[j] = weight * weight;
            d[j] = gate * (1 + s * (1 - gate)) * share * (d[j] + g1 + more);
        }
        blank_unread(of, b, token, tile, 0, d);
        keep_biases(&call->biases, of, b, h, t, tile, of->start[token] - tile.low, of->stop[token] - tile.low, d);
    }
    over_keys(tile, kept[1] + before, Jp, room->k, Kp, Kp, room->sums, Kp);
    put_rows(of, call->d_q, b, h, tile.from, tile.count, call->scale, room->sums, Kp);
}

/* TALL keys against the tokens of a block that may read them. */
static void gather_keys(void *given, const void *of_call, int64_t from, Tile readers, int64_t key, int64_t column)
{
    Room *room = given;
    const int64_t Kp = room->Kp, Jp = room->Jp, Vp = room->Vp, wide = Kp + Vp, row = readers.from, num = readers.count;
    const int64_t at_row = row * Jp + column;
    const float *a = room->weights + at_row, *d = room->d_scores + at_row, *square = room->squares + at_row;
    const float *pull = room->pull + row * wide;
    product(1, TALL, num, Kp, d, 1, Jp, room->q + (from + row) * Kp, Kp, room->d_k + key * Kp, Kp);
    product(1, TALL, num, Kp, a, 1, Jp, pull, wide, room->d_v + key * Kp, Kp);
    if (!((const SiluCall *)of_call)->mean_alone)
        product(1, TALL, num, Vp, square, 1, Jp, pull + Kp, wide, room->d_v_squares + key * Vp, Vp);
}

static void backward_head(void *given, const void *of_call, int64_t b, int64_t h)
{
    Room *room = given;
    const SiluCall *call = of_call;
    const Packing *of = &call->of;
    const int64_t K = of->K, J = of->J, Kp = room->Kp, Jp = room->Jp, Vp = room->Vp;
    make_room(call->d_k, b, h, 0, J, K);
    make_room(call->d_v, b, h, 0, J, K);
    memset(room->d_k, 0, Jp * Kp * sizeof(float));
    memset(room->d_v, 0, Jp * Kp * sizeof(float));
    memset(room->d_v_squares, 0, Jp * Vp * sizeof(float));
    begin_biases(&call->biases, of, b, h);
    each_block(of, b, h, room, call, backward_tile, gather_keys);
    if (!call->mean_alone)
        for (int64_t j = 0; j < J; j++) {
            const float *v = room->v + j * Vp, *squares = room->d_v_squares + j * Vp;
            float *d_v = room->d_v + j * Kp;
            for (int64_t i = 0; i < K; i++)
                d_v[i] = d_v[i] + squares[i] + 2 * v[i] * squares[Kp + i];
        }
    put_rows(of, call->d_k, b, h, 0, J, 1, room->d_k, Kp);
    put_rows(of, call->d_v, b, h, 0, J, 1, room->d_v, Kp);
}

static const Mechanism mechanism = {take, fetch, forward_tile, backward_head};

/* Equations (8.2, 8.3) and (8.3, 8.6); 0, or 1 where memory is short. */
int silu_forward(const SiluCall *call) { return each_head(&mechanism, &call->of, call, 0); }

/* Equations (a) and (b). */
int silu_backward(const SiluCall *call) { return each_head(&mechanism, &call->of, call, 1); }
