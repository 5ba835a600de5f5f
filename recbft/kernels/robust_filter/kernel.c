/* Isotropic robust filter attention of a packed batch, head by head in the cache: nothing of tokens by keys is kept.
 *
 * Coordinates are complex, real and imaginary parts next to each other, turned on the way in and back on the way out.
 * With E, P and s of the lag, and Q, K, V turned,
 *
 *     R2 = |Q|^2 + E^2 |K|^2 - 2 E Q . K      x = s R2      y = log(1 + x), or x      L = log P - kappa y        (9.8, 9.9)
 *     a = softmax(tau L + b)                  mean = sum a E V                        evidence = sum exp(L)      (9.11, 9.12)
 *
 * and backwards, with g and g_e the gradients of the mean, turned, and of the evidence,
 *
 *     da = (g V') E    dl = a (da - sum a da)    dL = tau dl + g_e exp(L)                                        (a)
 *     dy = -kappa dL   dx = dy / (1 + x) or dy   dR2 = dx s    dc = E dR2                                        (b)
 *     dQ = 2 (Q sum_j dR2 - dc K)    dK = 2 (K sum_t E dc - dc' Q)    dV = (a E)' g                              (c)
 *     d log E = 2 dc (E |K|^2 - Q . K) + da a    d log P = dL    d s = dx R2                                     (d)
 *     d kappa = -sum dL y    d tau = sum dl L                                                                    (e)
 *
 * Shapes: B rows, H heads, T tokens that read, J keys, K real coordinates, L lags.
 */

#include "lag_tables.h"

typedef struct {
    Packing of;
    int64_t student, turns_values, L;
    HeadView q, k, v;
    const float *turn_query, *turn_key; /* (B or 1, H, T, K), or NULL: cosine and sine of each coordinate's turn */
    int64_t turn_query_row, turn_key_row;
    const float *log_decay, *log_precision, *sharpness; /* (H, L): log E, log P, s */
    const float *kappa, *temperature;                   /* (H) */
    const float *key_bias;                              /* (B, J) or NULL */
    HeadView mean;
    float *evidence, *log_total; /* (B, H, T); the evidence or NULL */
    HeadView grad_mean;
    const float *grad_evidence; /* or NULL */
    HeadView d_q, d_k, d_v;
    float *d_log_decay, *d_log_precision, *d_sharpness; /* (B, H, L) */
    float *d_kappa, *d_temperature;                     /* (B, H) */
    float *d_key_bias;                                  /* (B, H, J) or NULL */
} FilterCall;

/* What a head is worked on with. */
typedef struct {
    int64_t Kp, Jp;
    LagTables tables;
    float *q, *k, *k_columns, *v, *v_columns, *g;
    float *q_square, *k_square;                   /* (T), (Jp) */
    float *weights, *d_cross;                     /* (BLOCK, Jp): a E, dc */
    float *sums;                                  /* (TALL, Kp) */
    float *logit;                                 /* (TALL, Jp): L */
    float *misfit, *residual, *a, *flow, *temper; /* (Jp): y, R2, a, dR2 and dl L of a token */
    float *bias, *d_bias;                         /* (Jp) */
    float *d_k, *d_v, *d_k_square;                /* (Jp, Kp) twice, (Jp) */
} Room;

_Static_assert(sizeof(Room) <= ROOM_BYTES, "make ROOM_BYTES larger");

static void *take(void *given, const void *of_call, int backward)
{
    Room *room = given;
    const FilterCall *call = of_call;
    (void)backward;
    const int64_t Kp = padded(call->of.K), Jp = padded(call->of.J), T = call->of.T;
    LagTables *tables = &room->tables;
    const int64_t width = width_of_table(call->L, Jp);
    float *in_order;
    const int64_t sizes[] = {T * Kp, Jp * Kp, Kp * Jp, Jp * Kp, Kp * Jp, T * Kp, padded(T), Jp, BLOCK * Jp, BLOCK * Jp,
                             TALL * Kp, TABLES * width, TABLES * width, Jp, TALL * TABLES * Jp, TALL * Jp, Jp, Jp,
                             Jp, Jp, Jp, Jp, Jp, Jp * Kp, Jp * Kp, Jp};
    float **parts[] = {&room->q, &room->k, &room->k_columns, &room->v, &room->v_columns, &room->g, &room->q_square,
                       &room->k_square, &room->weights, &room->d_cross, &room->sums, &tables->values, &tables->sums,
                       &in_order, &tables->picked, &room->logit, &room->misfit, &room->residual, &room->a, &room->flow,
                       &room->temper, &room->bias, &room->d_bias, &room->d_k, &room->d_v, &room->d_k_square};
    room->Kp = Kp, room->Jp = tables->Jp = Jp, tables->L = call->L, tables->width = width;
    void *taken = allot(sizeof sizes / sizeof *sizes, sizes, parts);
    if (taken)
        tables->in_order = (int32_t *)in_order;
    return taken;
}

/* Coordinates times a turn, or its conjugate where `back` is -1; as they are where there is none. */
static void turned(int64_t K, const float *x, const float *turn, float back, float *to)
{
    if (!turn) {
        memcpy(to, x, K * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < K; i += 2) {
        const float real = x[i], imaginary = x[i + 1], cosine = turn[i], sine = back * turn[i + 1];
        to[i] = real * cosine - imaginary * sine;
        to[i + 1] = real * sine + imaginary * cosine;
    }
}

INLINE const float *turn_of(const float *turns, int64_t row, int64_t b, int64_t h, int64_t tokens, int64_t t, int64_t K)
{
    return turns ? turns + b * row + (h * tokens + t) * K : NULL;
}

INLINE const float *query_turn(const FilterCall *call, int64_t b, int64_t h, int64_t t)
{
    return turn_of(call->turn_query, call->turn_query_row, b, h, call->of.T, t, call->of.K);
}

INLINE const float *key_turn(const FilterCall *call, int64_t b, int64_t h, int64_t j)
{
    return turn_of(call->turn_key, call->turn_key_row, b, h, call->of.J, j, call->of.K);
}

static void fetch(void *given, const void *of_call, int64_t b, int64_t h, int backward)
{
    Room *room = given;
    const FilterCall *call = of_call;
    const int64_t K = call->of.K, J = call->of.J, T = call->of.T, Kp = room->Kp, Jp = room->Jp;
    const float *q = at(call->q, b, h), *k = at(call->k, b, h), *v = at(call->v, b, h);
    memset(room->q, 0, T * Kp * sizeof(float));
    memset(room->k, 0, Jp * Kp * sizeof(float));
    memset(room->v, 0, Jp * Kp * sizeof(float));
    memset(room->k_square, 0, Jp * sizeof(float));
    for (int64_t t = 0; t < T; t++) {
        ask_for(call->q, call->of.H, b, h, t, K);
        turned(K, q + t * call->q.token, query_turn(call, b, h, t), 1, room->q + t * Kp);
        room->q_square[t] = dot(room->q + t * Kp, room->q + t * Kp, Kp);
    }
    for (int64_t j = 0; j < J; j++) {
        ask_for(call->k, call->of.H, b, h, j, K);
        ask_for(call->v, call->of.H, b, h, j, K);
        turned(K, k + j * call->k.token, key_turn(call, b, h, j), 1, room->k + j * Kp);
        turned(K, v + j * call->v.token, call->turns_values ? key_turn(call, b, h, j) : NULL, 1, room->v + j * Kp);
        room->k_square[j] = dot(room->k + j * Kp, room->k + j * Kp, Kp);
    }
    transpose(room->k, Jp, Kp, room->k_columns);
    const int64_t by_lag = h * call->L;
    const float *tables[] = {call->log_decay + by_lag, call->log_precision + by_lag, call->sharpness + by_lag};
    lay_tables(&room->tables, &call->of, b, tables);
    memset(room->bias, 0, Jp * sizeof(float));
    if (call->key_bias)
        memcpy(room->bias, call->key_bias + b * J, J * sizeof(float));
    if (!backward)
        return;
    transpose(room->v, Jp, Kp, room->v_columns);
    memset(room->g, 0, T * Kp * sizeof(float));
    for (int64_t t = 0; t < T; t++) {
        const float *turn = call->turns_values ? query_turn(call, b, h, t) : NULL;
        ask_for(call->grad_mean, call->of.H, b, h, t, K);
        turned(K, at(call->grad_mean, b, h) + t * call->grad_mean.token, turn, 1, room->g + t * Kp);
    }
}

/* Equation (9.8, 9.9) of a token, the r-th of its tile, from its products; L and the scores, tau L + b, are -inf where it may
 * not read. Returns the largest score, or 0 where nothing is read. */
static float logits(Room *room, const FilterCall *call, int64_t b, int64_t h, int64_t t, Tile tile, int64_t r,
                    const float *cross, float *score)
{
    const Packing *of = &call->of;
    const int64_t token = b * of->T + t, start = of->start[token] - tile.low, stop = of->stop[token] - tile.low;
    const float *k_square = room->k_square + tile.low, *bias = room->bias + tile.low;
    const float q_square = room->q_square[t], kappa = call->kappa[h], temperature = call->temperature[h];
    float *y = room->misfit, *residual = room->residual, *L = room->logit + r * room->Jp;
    find_tables(&room->tables, of, b, t, tile, r);
    const float *const *table = room->tables.of[r], *E = table[DECAY], *P = table[PRECISION], *s = table[SHARPNESS];
    const int student = (int)call->student;
#pragma omp simd
    for (int64_t j = 0; j < tile.width; j++) {
        float R2 = q_square + E[j] * (E[j] * k_square[j] - 2 * cross[j]);
        R2 = R2 < 0 ? 0 : R2; /* near numbers' difference can round below 0 */
        float x = s[j] * R2;
        residual[j] = R2;
        y[j] = student ? logarithm_of_one_more(x) : x;
        const float own = P[j] - kappa * y[j];
        const int reads = j >= start && j < stop;
        L[j] = reads ? own : -INFINITY;
        score[j] = reads ? temperature * own + bias[j] : -INFINITY;
    }
    if (of->gaps[token])
        for (int64_t j = start; j < stop; j++)
            if (!may_read(of, b, token, tile.low + j))
                L[j] = score[j] = -INFINITY;
    return start < stop ? largest(score, tile.width) : 0;
}

static void forward_tile(void *given, const void *of_call, int64_t b, int64_t h, Tile tile)
{
    Room *room = given;
    const FilterCall *call = of_call;
    const Packing *of = &call->of;
    const int64_t K = of->K, Kp = room->Kp, Jp = room->Jp;
    float *weights = room->weights, top[TALL];
    make_room(call->mean, b, h, tile.from, tile.count, K);
    product(0, tile.count, K, tile.width, room->q + tile.from * Kp, Kp, 1, room->k_columns + tile.low, Jp, weights, Jp);
    for (int64_t r = 0; r < tile.count; r++)
        top[r] = logits(room, call, b, h, tile.from + r, tile, r, weights + r * Jp, weights + r * Jp);
    exponentials(weights, Jp, tile, top);
    if (call->evidence) {
        const float none[TALL] = {0};
        exponentials(room->logit, Jp, tile, none);
    }
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t own = (b * of->H + h) * of->T + tile.from + r;
        const float *E = room->tables.of[r][DECAY];
        float *row = weights + r * Jp;
        const float total = sum_of(row, tile.width), share = total == 0 ? 0 : 1 / total;
        for (int64_t j = 0; j < tile.width; j++)
            row[j] = row[j] * E[j] * share;
        call->log_total[own] = total == 0 ? INFINITY : top[r] + logf(total);
        if (call->evidence)
            call->evidence[own] = sum_of(room->logit + r * Jp, tile.width);
    }
    over_keys(tile, weights, Jp, room->v, Kp, Kp, room->sums, Kp);
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t t = tile.from + r;
        const float *turn = call->turns_values ? query_turn(call, b, h, t) : NULL;
        turned(K, room->sums + r * Kp, turn, -1, at(call->mean, b, h) + t * call->mean.token);
    }
}

/* Equations (a), (b), (d) and (e) of a token: a E over its products, dc over g V'; the sum of dR2. */
static float backward_token(Room *room, const FilterCall *call, int64_t b, int64_t h, int64_t t, Tile tile, float *row,
                            float *d)
{
    const Packing *of = &call->of;
    const int64_t head = b * of->H + h, own = head * of->T + t;
    const float kappa = call->kappa[h], temperature = call->temperature[h], total = call->log_total[own];
    const float g_e = call->grad_evidence ? call->grad_evidence[own] : 0;
    float *a = room->a, *y = room->misfit, *L = room->logit, *residual = room->residual, *flow = room->flow;
    float *temper = room->temper, *d_bias = room->d_bias + tile.low, *d_k_square = room->d_k_square + tile.low;
    const float *k_square = room->k_square + tile.low;
    logits(room, call, b, h, t, tile, 0, row, a);
    const float *E = room->tables.of[0][DECAY], *s = room->tables.of[0][SHARPNESS];
    for (int64_t j = 0; j < tile.width; j++)
        a[j] = exponential(a[j] - total);
    const float share = 1 / sum_of(a, tile.width); /* near 1: what the log has lost would not cancel in dl */
    for (int64_t j = 0; j < tile.width; j++) {
        a[j] *= share;
        d[j] *= E[j];
    }
    const float along = dot(a, d, tile.width);
    const int student = (int)call->student;
#pragma omp simd
    for (int64_t j = 0; j < tile.width; j++) {
        const int reads = L[j] != -INFINITY;
        const float dl = a[j] * (d[j] - along), R2 = residual[j], x = s[j] * R2, cross = row[j];
        const float of_evidence = reads ? g_e * exponential(L[j]) : 0;
        const float dL = temperature * dl + of_evidence, dx = (student ? 1 / (1 + x) : 1) * -kappa * dL;
        const float dR2 = dx * s[j], dc = E[j] * dR2;
        temper[j] = a[j] == 0 ? 0 : dl * L[j];
        flow[j] = dR2;
        d_bias[j] += dl;
        d_k_square[j] += E[j] * dc;
        residual[j] = reads ? 2 * dc * (E[j] * k_square[j] - cross) + d[j] * a[j] : 0; /* d log E */
        row[j] = a[j] * E[j];
        a[j] = reads ? dL : 0;
        L[j] = reads ? dx * R2 : 0; /* ds */
        d[j] = dc;
    }
    call->d_kappa[head] -= dot(a, y, tile.width);
    call->d_temperature[head] += sum_of(temper, tile.width);
    add_to_tables(&room->tables, of, b, t, tile, 0, (const float *[]){residual, a, L});
    return sum_of(flow, tile.width);
}

static void backward_tile(void *given, const void *of_call, int64_t b, int64_t h, Tile tile, int64_t row, Tile block)
{
    Room *room = given;
    const FilterCall *call = of_call;
    const Packing *of = &call->of;
    const int64_t K = of->K, Kp = room->Kp, Jp = room->Jp;
    const int64_t before = tile.low - block.low, after = block.width - before - tile.width;
    float *weights = room->weights + row * Jp, *d_cross = room->d_cross + row * Jp, d_square[TALL];
    float *a = weights + before, *d = d_cross + before;
    make_room(call->d_q, b, h, tile.from, tile.count, K);
    product(0, tile.count, K, tile.width, room->q + tile.from * Kp, Kp, 1, room->k_columns + tile.low, Jp, a, Jp);
    product(0, tile.count, K, tile.width, room->g + tile.from * Kp, Kp, 1, room->v_columns + tile.low, Jp, d, Jp);
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t t = tile.from + r;
        blank_rest(weights + r * Jp, before, tile.width, after);
        blank_rest(d_cross + r * Jp, before, tile.width, after);
        d_square[r] = 0;
        if (reads_any(of, b, t)) {
            d_square[r] = backward_token(room, call, b, h, t, tile, a + r * Jp, d + r * Jp);
        } else {
            memset(a + r * Jp, 0, tile.width * sizeof(float));
            memset(d + r * Jp, 0, tile.width * sizeof(float));
        }
    }
    over_keys(tile, d, Jp, room->k, Kp, Kp, room->sums, Kp);
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t t = tile.from + r;
        float *sums = room->sums + r * Kp;
        const float *q = room->q + t * Kp;
        for (int64_t i = 0; i < K; i++)
            sums[i] = 2 * (q[i] * d_square[r] - sums[i]);
        turned(K, sums, query_turn(call, b, h, t), -1, at(call->d_q, b, h) + t * call->d_q.token);
    }
}

/* TALL keys against the tokens of a block that may read them. */
static void gather_keys(void *given, const void *of_call, int64_t from, Tile readers, int64_t key, int64_t column)
{
    Room *room = given;
    const int64_t Kp = room->Kp, Jp = room->Jp, row = readers.from, num = readers.count, first = (from + row) * Kp;
    const float *a = room->weights + row * Jp + column, *d = room->d_cross + row * Jp + column;
    product(1, TALL, num, Kp, d, 1, Jp, room->q + first, Kp, room->d_k + key * Kp, Kp);
    product(1, TALL, num, Kp, a, 1, Jp, room->g + first, Kp, room->d_v + key * Kp, Kp);
    (void)of_call;
}

static void backward_head(void *given, const void *of_call, int64_t b, int64_t h)
{
    Room *room = given;
    const FilterCall *call = of_call;
    const Packing *of = &call->of;
    const int64_t K = of->K, J = of->J, Kp = room->Kp, Jp = room->Jp, head = b * of->H + h;
    memset(room->d_k, 0, Jp * Kp * sizeof(float));
    memset(room->d_v, 0, Jp * Kp * sizeof(float));
    memset(room->d_k_square, 0, Jp * sizeof(float));
    memset(room->d_bias, 0, Jp * sizeof(float));
    memset(room->tables.sums, 0, TABLES * room->tables.width * sizeof(float));
    make_room(call->d_k, b, h, 0, J, K);
    make_room(call->d_v, b, h, 0, J, K);
    call->d_kappa[head] = call->d_temperature[head] = 0;
    each_block(of, b, h, room, call, backward_tile, gather_keys);
    const int64_t by_lag = head * call->L;
    float *sums[] = {call->d_log_decay + by_lag, call->d_log_precision + by_lag, call->d_sharpness + by_lag};
    sum_tables(&room->tables, sums);
    if (call->d_key_bias)
        memcpy(call->d_key_bias + head * J, room->d_bias, J * sizeof(float));
    for (int64_t j = 0; j < J; j++) {
        const float *turn = key_turn(call, b, h, j), *k = room->k + j * Kp;
        float *d_k = room->d_k + j * Kp;
        for (int64_t i = 0; i < K; i++)
            d_k[i] = 2 * (k[i] * room->d_k_square[j] - d_k[i]);
        turned(K, d_k, turn, -1, at(call->d_k, b, h) + j * call->d_k.token);
        turned(K, room->d_v + j * Kp, call->turns_values ? turn : NULL, -1, at(call->d_v, b, h) + j * call->d_v.token);
    }
}

static const Mechanism mechanism = {take, fetch, forward_tile, backward_head};

/* Equations (9.8, 9.9) and (9.11, 9.12); 0, or 1 where memory is short. */
int robust_filter_forward(const FilterCall *call) { return each_head(&mechanism, &call->of, call, 0); }

/* Equations (a) to (e). */
int robust_filter_backward(const FilterCall *call) { return each_head(&mechanism, &call->of, call, 1); }
