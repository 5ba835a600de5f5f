/* The sandwich precision of an innovation from the sums of silu.c, token by token:
 *
 *     d = max(s1^2, 1e-6 s2 + 1e-12)    m = e s1 / d, or e    spread = max(w2 - 2 m w1 + m^2 s2, 0)
 *     r = 1 / max(spread / d, 1 / cap), 0 where nothing is read                                       (2.7, 2.10)
 *
 * Shapes: B rows, H heads, T tokens, K head width.
 */

#include "heads.h"

typedef struct {
    int64_t B, H, T, K;
    int64_t root; /* m = e s1 / d */
    float cap;
    HeadView mean, square_mean, square_second, precision;
    const float *weight_sum, *square_sum; /* (B, H, T) */
    HeadView grad_precision, d_mean, d_square_mean, d_square_second;
    float *d_weight_sum, *d_square_sum;
} SandwichCall;

typedef struct {
    int64_t own; /* its place in (B, H, T) */
    const float *e, *w1, *w2;
    float s1, s2, floor, inverse, to_m; /* 1 / d; of e */
} Token;

INLINE Token token_of(const SandwichCall *call, int64_t b, int64_t h, int64_t t)
{
    const int64_t own = (b * call->H + h) * call->T + t;
    const float s1 = call->weight_sum[own], s2 = call->square_sum[own];
    const float floor = 1e-6f * s2 + 1e-12f, d = s1 * s1 > floor ? s1 * s1 : floor;
    return (Token){own,
                   at(call->mean, b, h) + t * call->mean.token,
                   at(call->square_mean, b, h) + t * call->square_mean.token,
                   at(call->square_second, b, h) + t * call->square_second.token,
                   s1, s2, floor, 1 / d, call->root ? s1 / d : 1};
}

void sandwich_forward(const SandwichCall *call)
{
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < call->B * call->T; i++)
        for (int64_t h = 0; h < call->H; h++) { /* in the order of memory */
            const int64_t b = i / call->T, t = i % call->T;
            const Token of = token_of(call, b, h, t);
            const float s2 = of.s2, to_m = of.to_m, inverse = of.inverse, least_variance = 1 / call->cap;
            const float *e = of.e, *w1 = of.w1, *w2 = of.w2;
            float *r = at(call->precision, b, h) + t * call->precision.token;
#pragma omp simd
            for (int64_t k = 0; k < call->K; k++) {
                float m = e[k] * to_m, spread = w2[k] - 2 * m * w1[k] + m * m * s2;
                float variance = (spread < 0 ? 0 : spread) * inverse;
                r[k] = s2 == 0 ? 0 : 1 / (variance < least_variance ? least_variance : variance);
            }
        }
}

void sandwich_backward(const SandwichCall *call)
{
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < call->B * call->T; i++)
        for (int64_t h = 0; h < call->H; h++) { /* in the order of memory */
            const int64_t b = i / call->T, t = i % call->T;
            const Token of = token_of(call, b, h, t);
            const float s1 = of.s1, s2 = of.s2, to_m = of.to_m, inverse = of.inverse, least_variance = 1 / call->cap;
            const float *e = of.e, *w1 = of.w1, *w2 = of.w2;
            const float *g = at(call->grad_precision, b, h) + t * call->grad_precision.token;
            float *d_e = at(call->d_mean, b, h) + t * call->d_mean.token;
            float *d_w1 = at(call->d_square_mean, b, h) + t * call->d_square_mean.token;
            float *d_w2 = at(call->d_square_second, b, h) + t * call->d_square_second.token;
            float to_s2 = 0, along_spread = 0, along_m = 0; /* sums of m^2 g, g spread and g_m e */
#pragma omp simd reduction(+ : to_s2, along_spread, along_m)
            for (int64_t k = 0; k < call->K; k++) {
                float m = e[k] * to_m, spread = w2[k] - 2 * m * w1[k] + m * m * s2, variance = spread * inverse;
                float own = s2 != 0 && variance > least_variance ? -g[k] / (variance * variance) * inverse : 0;
                float g_m = 2 * own * (m * s2 - w1[k]);
                d_w2[k] = own;
                d_w1[k] = -2 * m * own;
                d_e[k] = g_m * to_m;
                to_s2 += m * m * own;
                along_spread += own * spread;
                along_m += g_m * e[k];
            }
            float g_d = -along_spread * inverse, g_s1 = 0;
            if (call->root) {
                g_s1 = along_m * inverse;
                g_d -= along_m * s1 * inverse * inverse;
            }
            const int held = s1 * s1 <= of.floor;
            call->d_weight_sum[of.own] = g_s1 + (held ? 0 : 2 * s1 * g_d);
            call->d_square_sum[of.own] = to_s2 + (held ? 1e-6f * g_d : 0);
        }
}
