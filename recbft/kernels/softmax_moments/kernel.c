/* Softmax moments of a packed batch, head by head in the cache: nothing of tokens by keys is kept.
 *
 * With u = v - the value of the first token of the history, and l the logits,
 *
 *     a = softmax(l)    o = sum a u    e = o + first value    S = sum a u^2 - o^2    n = 1 / sum a^2  (2.3 to 2.6)
 *     r = min((n + nu) / (S + c), cap), 0 where nothing is read                        REML, where asked for   (2.8)
 *
 * and backwards, with G = g_e - 2 g_S o, as in torch.py,
 *
 *     dA = G u' + g_S (u^2)' - 2 g_n n^2 a             dl = a (dA - sum a dA)                                  (a)
 *     dq = dl k / sqrt(K)    dk = dl' q / sqrt(K)      dv = a' G + 2 u (a' g_S)                                (b)
 *
 * Weights are formed in blocks of tokens, against the keys from the first to the last that a few neighbouring tokens
 * may read: short histories that share a row cost what they would cost alone, and a causal row half.
 *
 * Shapes: B rows, H heads, T tokens that read, J keys, K head width.
 */

#include "heads.h"

enum { MEAN, MOMENTS, REML };

typedef struct {
    Packing of;
    int64_t kind;
    float scale, nu, constant, cap; /* of the logits, 1 / sqrt(K); of (2.8) */
    HeadView q, k, v;
    Biases biases;
    HeadView mean, second;       /* e; S or r */
    float *size, *log_total; /* n and log sum exp l, (B, H, T) */
    HeadView grad_mean, grad_second;
    const float *grad_size; /* (B, H, T), of MOMENTS */
    HeadView d_q, d_k, d_v;
} Call;

/* What a head is worked on with; allocated once per thread. */
typedef struct {
    int64_t Kp, Jp, Up; /* K and J padded; width of the values beside their squares, or alone */
    float *q, *k, *k_columns, *u, *u_columns;
    float *weights, *d_weights; /* (BLOCK, Jp) */
    float *pull;                /* (BLOCK, Up): G beside g_S */
    float *sums;                /* (TALL, Up) */
    float *d_k, *d_u;           /* (Jp, Kp), (Jp, Up) */
} Room;

_Static_assert(sizeof(Room) <= ROOM_BYTES, "make ROOM_BYTES larger");

static void *take(void *given, const void *of_call, int backward)
{
    Room *room = given;
    const Call *call = of_call;
    const int64_t Kp = padded(call->of.K), Jp = padded(call->of.J), Up = call->kind == MEAN ? Kp : 2 * Kp;
    const int64_t sizes[] = {call->of.T * Kp, Jp * Kp, Kp * Jp, Jp * Up, Up * Jp, BLOCK * Jp, BLOCK * Jp, BLOCK * Up,
                             TALL * Up, backward ? Jp * Kp : 0, backward ? Jp * Up : 0};
    float **parts[] = {&room->q, &room->k, &room->k_columns, &room->u, &room->u_columns, &room->weights,
                       &room->d_weights, &room->pull, &room->sums, &room->d_k, &room->d_u};
    room->Kp = Kp, room->Jp = Jp, room->Up = Up;
    return allot(sizeof sizes / sizeof *sizes, sizes, parts);
}

/* Operands of a head, padded: q scaled, k, u = v - first value beside u^2, and k and u by columns. */
static void fetch(void *given, const void *of_call, int64_t b, int64_t h, int backward)
{
    Room *room = given;
    const Call *call = of_call;
    const int64_t K = call->of.K, Kp = room->Kp, Jp = room->Jp, Up = room->Up;
    const Packing *of = &call->of;
    fetch_rows(of, call->q, b, h, of->T, call->scale, room->q, of->T, Kp);
    fetch_rows(of, call->k, b, h, of->J, 1, room->k, Jp, Kp);
    fetch_rows(of, call->v, b, h, of->J, 1, room->u, Jp, Up);
    for (int64_t j = 0; j < of->J && call->kind != MEAN; j++) {
        const float *first = at(call->v, b, h) + of->first[b * of->J + j] * call->v.token;
        float *u = room->u + j * Up;
#pragma omp simd
        for (int64_t i = 0; i < K; i++) {
            float centred = u[i] - first[i];
            u[i] = centred;
            u[Kp + i] = centred * centred;
        }
    }
    transpose(room->k, Jp, Kp, room->k_columns);
    if (backward)
        transpose(room->u, Jp, Up, room->u_columns);
}

static void forward_tile(void *given, const void *of_call, int64_t b, int64_t h, Tile tile)
{
    Room *room = given;
    const Call *call = of_call;
    const int64_t K = call->of.K, Kp = room->Kp, Jp = room->Jp, Up = room->Up;
    float *weights = room->weights;
    make_room(call->mean, b, h, tile.from, tile.count, K);
    if (call->kind != MEAN)
        make_room(call->second, b, h, tile.from, tile.count, K);
    product(0, tile.count, K, tile.width, room->q + tile.from * Kp, Kp, 1, room->k_columns + tile.low, Jp, weights, Jp);
    float size[TALL], top[TALL];
    for (int64_t r = 0; r < tile.count; r++) {
        add_biases(&call->biases, &call->of, b, h, tile.from + r, tile, -INFINITY, weights + r * Jp);
        top[r] = reads_any(&call->of, b, tile.from + r) ? largest(weights + r * Jp, tile.width) : 0;
    }
    exponentials(weights, Jp, tile, top);
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t own = (b * call->of.H + h) * call->of.T + tile.from + r;
        float *row = weights + r * Jp;
        const float total = sum_of(row, tile.width), share = total == 0 ? 0 : 1 / total;
        if (call->kind != MEAN)
            call->size[own] = size[r] = total == 0 ? 0 : total * total / dot(row, row, tile.width);
        for (int64_t j = 0; j < tile.width; j++)
            row[j] *= share;
        call->log_total[own] = total == 0 ? INFINITY : top[r] + logf(total);
    }
    over_keys(tile, weights, Jp, room->u, Up, Up, room->sums, Up);
    if (call->kind == MEAN) {
        put_rows(&call->of, call->mean, b, h, tile.from, tile.count, 1, room->sums, Up);
        return;
    }
    const float *v = at(call->v, b, h);
    for (int64_t r = 0; r < tile.count; r++) {
        const int64_t t = tile.from + r, start = call->of.start[b * call->of.T + t];
        const float *o = room->sums + r * Up;
        float *mean = at(call->mean, b, h) + t * call->mean.token;
        float *second = at(call->second, b, h) + t * call->second.token;
        if (size[r] == 0) {
            memset(mean, 0, K * sizeof(float));
            memset(second, 0, K * sizeof(float));
            continue;
        }
        const float *first = v + call->of.first[b * call->of.J + start] * call->v.token;
        const float above = call->kind == REML ? size[r] + call->nu : 0;
#pragma omp simd
        for (int64_t i = 0; i < K; i++) {
            mean[i] = o[i] + first[i];
            float S = o[Kp + i] - o[i] * o[i];
            S = S < 0 ? 0 : S;
            if (call->kind == REML) {
                float precision = above / (S + call->constant);
                second[i] = precision > call->cap ? call->cap : precision;
            } else {
                second[i] = S;
            }
        }
    }
}

/* G beside g_S of a token, with 2 g_n n^2 returned. */
static float pull_of(Room *room, const Call *call, int64_t b, int64_t h, int64_t t, float *pull)
{
    const int64_t K = call->of.K, own = (b * call->of.H + h) * call->of.T + t;
    const float *g = at(call->grad_mean, b, h) + t * call->grad_mean.token;
    const HeadView *read[] = {&call->grad_mean, &call->grad_second, &call->second, &call->mean};
    for (int i = 0; i < (call->kind == MEAN ? 1 : 4); i++)
        ask_for(*read[i], call->of.H, b, h, t, K);
    memset(pull, 0, room->Up * sizeof(float));
    if (call->kind == MEAN) {
        memcpy(pull, g, K * sizeof(float));
        return 0;
    }
    const float n = call->size[own];
    if (n == 0)
        return 0;
    const float *g_second = at(call->grad_second, b, h) + t * call->grad_second.token;
    const float *second = at(call->second, b, h) + t * call->second.token;
    const float *mean = at(call->mean, b, h) + t * call->mean.token;
    const int64_t start = call->of.start[b * call->of.T + t];
    const float *first = at(call->v, b, h) + call->of.first[b * call->of.J + start] * call->v.token;
    float g_n = call->kind == MOMENTS ? call->grad_size[own] : 0;
    const float share = 1 / (n + call->nu);
    float *g_S = pull + room->Kp;
    if (call->kind == MOMENTS) {
        memcpy(g_S, g_second, K * sizeof(float));
    } else {
        const float cap = call->cap;
#pragma omp simd
        for (int64_t i = 0; i < K; i++) {
            const float flow = second[i] < cap ? g_second[i] * second[i] * share : 0;
            pull[i] = flow;
            g_S[i] = -flow * second[i];
        }
        g_n += sum_of(pull, room->Kp);
    }
#pragma omp simd
    for (int64_t i = 0; i < K; i++)
        pull[i] = g[i] - 2 * g_S[i] * (mean[i] - first[i]);
    return 2 * g_n * n * n;
}

/* a and dl of a few tokens, in the rows that are theirs; dq of them. */
static void backward_tile(void *given, const void *of_call, int64_t b, int64_t h, Tile tile, int64_t row, Tile block)
{
    Room *room = given;
    const Call *call = of_call;
    const int64_t K = call->of.K, Kp = room->Kp, Jp = room->Jp, Up = room->Up;
    const int64_t before = tile.low - block.low, after = block.width - before - tile.width;
    float *weights = room->weights + row * Jp, *d_weights = room->d_weights + row * Jp, *pull = room->pull + row * Up;
    float push[TALL];
    make_room(call->d_q, b, h, tile.from, tile.count, K);
    for (int64_t r = 0; r < tile.count; r++)
        push[r] = pull_of(room, call, b, h, tile.from + r, pull + r * Up);
    float *a = weights + before, *d = d_weights + before;
    product(0, tile.count, K, tile.width, room->q + tile.from * Kp, Kp, 1, room->k_columns + tile.low, Jp, a, Jp);
    product(0, tile.count, Up, tile.width, pull, Up, 1, room->u_columns + tile.low, Jp, d, Jp);
    for (int64_t r = 0; r < tile.count; r++)
        add_biases(&call->biases, &call->of, b, h, tile.from + r, tile, -INFINITY, a + r * Jp);
    exponentials(a, Jp, tile, call->log_total + (b * call->of.H + h) * call->of.T + tile.from);
    for (int64_t r = 0; r < tile.count; r++, a += Jp, d += Jp) {
        const int64_t t = tile.from + r;
        blank_rest(weights + r * Jp, before, tile.width, after);
        blank_rest(d_weights + r * Jp, before, tile.width, after);
        if (reads_any(&call->of, b, t)) {
            /* The sum is near 1: what the log has lost would not cancel in dl. */
            const float against = push[r], share = 1 / sum_of(a, tile.width);
            for (int64_t j = 0; j < tile.width; j++) {
                float weight = a[j] * share;
                a[j] = weight;
                d[j] -= against * weight;
            }
            const float along = dot(d, a, tile.width);
            for (int64_t j = 0; j < tile.width; j++)
                d[j] = a[j] * (d[j] - along);
        } else {
            memset(a, 0, tile.width * sizeof(float));
            memset(d, 0, tile.width * sizeof(float));
        }
        keep_biases(&call->biases, &call->of, b, h, t, tile, 0, least(tile.width, call->of.J - tile.low), d);
    }
    over_keys(tile, d_weights + before, Jp, room->k, Kp, Kp, room->sums, Kp);
    put_rows(&call->of, call->d_q, b, h, tile.from, tile.count, call->scale, room->sums, Kp);
}

/* TALL keys against the tokens of a block that may read them. */
static void gather_keys(void *given, const void *of_call, int64_t from, Tile readers, int64_t key, int64_t column)
{
    Room *room = given;
    const int64_t Kp = room->Kp, Jp = room->Jp, Up = room->Up, row = readers.from, num = readers.count;
    const float *a = room->weights + row * Jp + column, *d = room->d_weights + row * Jp + column;
    product(1, TALL, num, Kp, d, 1, Jp, room->q + (from + row) * Kp, Kp, room->d_k + key * Kp, Kp);
    product(1, TALL, num, Up, a, 1, Jp, room->pull + row * Up, Up, room->d_u + key * Up, Up);
    (void)of_call;
}

static void backward_head(void *given, const void *of_call, int64_t b, int64_t h)
{
    Room *room = given;
    const Call *call = of_call;
    const Packing *of = &call->of;
    const int64_t K = of->K, J = of->J, Kp = room->Kp, Jp = room->Jp, Up = room->Up;
    make_room(call->d_k, b, h, 0, J, K);
    make_room(call->d_v, b, h, 0, J, K);
    memset(room->d_k, 0, Jp * Kp * sizeof(float));
    memset(room->d_u, 0, Jp * Up * sizeof(float));
    begin_biases(&call->biases, of, b, h);
    each_block(of, b, h, room, call, backward_tile, gather_keys);
    if (call->kind != MEAN)
        for (int64_t j = 0; j < J; j++) {
            const float *u = room->u + j * Up;
            float *d_u = room->d_u + j * Up;
            for (int64_t i = 0; i < K; i++)
                d_u[i] += 2 * u[i] * d_u[Kp + i];
        }
    put_rows(of, call->d_k, b, h, 0, J, 1, room->d_k, Kp);
    put_rows(of, call->d_v, b, h, 0, J, 1, room->d_u, Up);
}

static const Mechanism mechanism = {take, fetch, forward_tile, backward_head};

/* Equations (2.3 to 2.6) and (2.8); 0, or 1 where memory is short. */
int softmax_forward(const Call *call) { return each_head(&mechanism, &call->of, call, 0); }

/* Equations (a) and (b). */
int softmax_backward(const Call *call) { return each_head(&mechanism, &call->of, call, 1); }
