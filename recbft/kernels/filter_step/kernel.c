/* Prediction in one pass over memory in each direction; the equations are (4.3) and (c) of filter_step/torch.py.
 *
 * Shapes: N tokens, D model width.
 */

#include "vectors.h"

#define TOKENS 64 /* of a sum over tokens */

/* lam'' = lam / (max((1 + J)^2, floor) + Q lam), clamped; J of all tokens, or (D) where `each` is 0. */
void predict_forward(int64_t N, int64_t D, int64_t each, float floor, float low, float cap, const float *lam,
                     const float *J, const float *Q, float *predicted)
{
#pragma omp parallel for schedule(static) if (N * D > 32768)
    for (int64_t n = 0; n < N; n++) {
        const float *own = lam + n * D, *slopes = each ? J + n * D : J;
#pragma omp simd
        for (int64_t i = 0; i < D; i++) {
            float stretch = 1 + slopes[i], s = stretch * stretch;
            s = s < floor ? floor : s;
            float x = own[i] / (s + Q[i] * own[i]);
            x = x < low ? low : x;
            predicted[n * D + i] = x > cap ? cap : x;
        }
    }
}

/* d_J may be NULL; d_Q is summed up over TOKENS tokens at a time, (ceil(N / TOKENS), D). */
void predict_backward(int64_t N, int64_t D, int64_t each, float floor, float low, float cap, const float *lam,
                      const float *J, const float *Q, const float *predicted, const float *g, float *d_lam, float *d_J,
                      float *d_Q)
{
#pragma omp parallel for schedule(static) if (N * D > 32768)
    for (int64_t from = 0; from < N; from += TOKENS) {
        float *sum = d_Q + from / TOKENS * D;
        memset(sum, 0, D * sizeof(float));
        for (int64_t n = from; n < least(from + TOKENS, N); n++) {
            const float *own = lam + n * D, *slopes = each ? J + n * D : J, *after = predicted + n * D;
#pragma omp simd
            for (int64_t i = 0; i < D; i++) {
                float stretch = 1 + slopes[i], square = stretch * stretch, s = square < floor ? floor : square;
                float inverse = 1 / (s + Q[i] * own[i]);
                float p = after[i] > low && after[i] < cap ? g[n * D + i] * inverse * inverse : 0;
                d_lam[n * D + i] = p * s;
                p *= own[i];
                sum[i] -= p * own[i];
                if (d_J)
                    d_J[n * D + i] = square > floor ? -2 * p * stretch : 0;
            }
        }
    }
}

int64_t predict_sums(int64_t N) { return (N + TOKENS - 1) / TOKENS; }
