/* GELU and a product with its slope, a few tokens at a time, so that the slope is never written to memory.
 *
 *     y = a Phi(a)        z = phi'(a) M            phi'(a) = Phi(a) + a N(a)                         (4.1, 4.2)
 *     d_a = phi'(a) * g_y + phi''(a) * (g_z M')    phi''(a) = N(a) (2 - a^2)                                (a)
 *
 * Phi(-|a|) = exp(-a^2 / 2) t P(t), t = 1 / (1 + c |a|): P is fitted to half of exp(x^2) erfc(x), x = |a| / sqrt(2),
 * to a relative error of 1.2e-7.
 *
 * Shapes: N tokens, F feed-forward width, R columns.
 */

#include "vectors.h"

#define TOKENS 16 /* at a time */

typedef struct {
    float share, bell; /* Phi(a); N(a) */
} Normal;

INLINE Normal normal(float a)
{
    const float c = 0.425f * 0.70710678118655f, peak = 0.39894228040143f;
    float t = 1.0f / (1.0f + c * fabsf(a)), density = exponential(-0.5f * a * a);
    float P = 0.20582962437537652f + t * (-0.15775190247469364f + t * 0.03602091645881475f);
    P = 0.12852628767046345f + t * (-0.053484440913383065f + t * P);
    P = 0.1198362034488765f + t * (0.12096800874489971f + t * (0.10005524060746487f + t * P));
    float tail = density * t * P;
    return (Normal){a > 0 ? 1.0f - tail : tail, peak * density};
}

/* Equation (4.1, 4.2); M (F, R) with rows padded to whole vectors, z (N, R); y may be NULL. */
int gelu_forward(int64_t N, int64_t F, int64_t R, const float *a, const float *M, float *y, float *z)
{
    const int64_t Rp = padded(R);
    int failed = 0;
#pragma omp parallel if (N * F > 32768)
    {
        float *slope = NULL, *out;
        if (posix_memalign((void **)&slope, 64, TOKENS * (F + Rp) * sizeof(float))) {
#pragma omp atomic write
            failed = 1;
            slope = NULL;
        }
        out = slope + TOKENS * F;
#pragma omp for schedule(static)
        for (int64_t from = 0; from < N; from += TOKENS) {
            if (!slope)
                continue;
            const int64_t rows = least(TOKENS, N - from);
            const float *points = a + from * F;
#pragma omp simd
            for (int64_t i = 0; i < rows * F; i++) {
                Normal at = normal(points[i]);
                slope[i] = at.share + points[i] * at.bell;
                if (y)
                    y[from * F + i] = points[i] * at.share;
            }
            product(0, rows, F, Rp, slope, F, 1, M, Rp, out, Rp);
            for (int64_t r = 0; r < rows; r++)
                memcpy(z + (from + r) * R, out + r * Rp, R * sizeof(float));
        }
        free(slope);
    }
    return failed;
}

/* Equation (a); M' (R, F) with rows padded to whole vectors. */
int gelu_backward(int64_t N, int64_t F, int64_t R, const float *a, const float *M_columns, const float *g_y,
                  const float *g_z, float *d_a)
{
    const int64_t Fp = padded(F);
    int failed = 0;
#pragma omp parallel if (N * F > 32768)
    {
        float *back = NULL;
        if (posix_memalign((void **)&back, 64, TOKENS * Fp * sizeof(float))) {
#pragma omp atomic write
            failed = 1;
            back = NULL;
        }
#pragma omp for schedule(static)
        for (int64_t from = 0; from < N; from += TOKENS) {
            if (!back)
                continue;
            const int64_t rows = least(TOKENS, N - from);
            product(0, rows, R, Fp, g_z + from * R, R, 1, M_columns, Fp, back, Fp);
            for (int64_t r = 0; r < rows; r++) {
                const float *points = a + (from + r) * F, *g = g_y + (from + r) * F, *pull = back + r * Fp;
                float *d = d_a + (from + r) * F;
#pragma omp simd
                for (int64_t i = 0; i < F; i++) {
                    const float x = points[i];
                    Normal at = normal(x);
                    d[i] = g[i] * (at.share + x * at.bell) + pull[i] * at.bell * (2 - x * x);
                }
            }
        }
        free(back);
    }
    return failed;
}

/* Rows of M and M' are as long as this says. */
int64_t gelu_padded(int64_t width) { return padded(width); }
