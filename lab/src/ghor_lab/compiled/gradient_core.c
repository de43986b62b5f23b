/* A run of gradient layers, h[l + 1] = h[l - 1] + K^T (a * tanh(K h[l] + b)), for many networks ("copies") at once.

   h[0] is the half of z that the first layer reads, h[-1] the one that it changes; then they take turns. A half lies as
   (copies, D, points). The parameters of layer l are w[3 l] = K (copies, m, D), w[3 l + 1] = a and w[3 l + 2] = b, both
   (copies, m). D is given by the compiler's command line. A vector holds 16 points. The forward pass keeps every h[l]
   that a layer reads, as (layers, copies, D, padded), points filled up to whole vectors; the backward pass computes
   tanh again.

   Copies c0 <= c < c1 are done; one call a thread. A sum over points is made within one call, in one order. */

#include <stddef.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define N 16

typedef float V __attribute__((vector_size(4 * N)));
typedef int I __attribute__((vector_size(4 * N)));
typedef float V8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));

static inline V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, V v) { memcpy(p, &v, sizeof v); }
static inline V all(float x) { return x - (V){}; }  /* keeps -0 */

/* the first `count` numbers, then zeros */
static inline V load_some(const float *p, ptrdiff_t count) {
    V v = {};
    memcpy(&v, p, 4 * (count < N ? count : N));
    return v;
}
static inline void store_some(float *p, V v, ptrdiff_t count) { memcpy(p, &v, 4 * (count < N ? count : N)); }

/* the smaller of the two, b if one is NaN */
static inline V smaller(V a, V b) {
#ifdef __AVX512F__
    return (V)_mm512_min_ps((__m512)a, (__m512)b);       /* the compiler makes three instructions of the line below */
#else
    I m = a < b;
    return (V)(((I)a & m) | ((I)b & ~m));
#endif
}

/* w/(w + 1) with w = (exp(2 |x|) - 1)/2, and the sign of x; the relative error is below 1.5e-7, also next to 0.
   2 |x| = n ln(2) + 2 r, so w = 2^n (exp(2 r) - 1)/2 + (2^n - 1)/2; exp(2 r) by a polynomial, |r| <= ln(2)/4.
   From 9 on it is 1 in float32. */
static inline V tanhv(V x) {
    V y = smaller(all(10.0f), (V)((I)x & 0x7fffffff));
    V shifted = y * 2.88539008f + 12583039.0f;           /* 3 2^22 + 127 + n: the low bits are the exponent of 2^n */
    V n = shifted - 12583039.0f;
    V r = y - n * 0.34657359f;
    V p = all(0.0446301253f);
    p = p * r + 0.133869636f;
    p = p * r + 0.333330206f;
    p = p * r + 0.66666164f;
    p = p * r + 1.0f;
    p = p * (r * r) + r;
    V power = (V)((I)shifted << 23);
    V w = p * power + (power * 0.5f - 0.5f);
    return (V)((I)(w / (w + 1.0f)) | ((I)x & (I)all(-0.0f)));
}

static inline float sum(V v) {
    V8 a[2];
    memcpy(a, &v, sizeof v);
    a[0] += a[1];
    V4 b[2];
    memcpy(b, a, sizeof b);
    b[0] += b[1];
    return (b[0][0] + b[0][1]) + (b[0][2] + b[0][3]);
}

/* x is h[-1], y is h[0]; h gets h[0 .. layers - 1], last h[layers], previous h[layers - 1] */
void forward(const float *const *w, const float *x, const float *y, float *h, float *last, float *previous,
             ptrdiff_t layers, ptrdiff_t copies, ptrdiff_t m, ptrdiff_t points, ptrdiff_t c0, ptrdiff_t c1) {
    const ptrdiff_t padded = (points + N - 1) / N * N, step = copies * D * padded;
    for (ptrdiff_t c = c0; c < c1; c++)
        for (ptrdiff_t i = 0; i < points; i += N) {
            const ptrdiff_t at = c * D * points + i, left = points - i;
            V X[D], Y[D];
            for (int j = 0; j < D; j++) {
                X[j] = load_some(x + at + j * points, left);
                Y[j] = load_some(y + at + j * points, left);
            }
            for (ptrdiff_t l = 0; l < layers; l++) {
                const float *K = w[3 * l] + c * m * D, *a = w[3 * l + 1] + c * m, *b = w[3 * l + 2] + c * m;
                float *kept = h + l * step + c * D * padded + i;
                for (int j = 0; j < D; j++) store(kept + j * padded, Y[j]);
                for (ptrdiff_t k = 0; k < m; k++) {
                    V z = all(b[k]);
                    for (int j = 0; j < D; j++) z += Y[j] * K[k * D + j];
                    V u = tanhv(z) * a[k];
                    for (int j = 0; j < D; j++) X[j] += u * K[k * D + j];
                }
                for (int j = 0; j < D; j++) { V t = X[j]; X[j] = Y[j]; Y[j] = t; }
            }
            for (int j = 0; j < D; j++) {
                store_some(last + at + j * points, Y[j], left);
                store_some(previous + at + j * points, X[j], left);
            }
        }
}

/* dlast and dprevious in, dx and dy out; dw as w. work is (copies, 2, D, padded) */
void backward(const float *const *w, const float *h, const float *dlast, const float *dprevious, float *const *dw,
              float *dx, float *dy, float *work, ptrdiff_t layers, ptrdiff_t copies, ptrdiff_t m, ptrdiff_t points,
              ptrdiff_t c0, ptrdiff_t c1) {
    const ptrdiff_t padded = (points + N - 1) / N * N, step = copies * D * padded;
    for (ptrdiff_t c = c0; c < c1; c++) {
        const ptrdiff_t at = c * D * points;
        float *g = work + c * 2 * D * padded, *f = g + D * padded;  /* of h[l + 1] and of h[l] */
        for (int j = 0; j < D; j++)
            for (ptrdiff_t i = 0; i < points; i += N) {             /* zeros beyond: those points add nothing */
                store(g + j * padded + i, load_some(dlast + at + j * points + i, points - i));
                store(f + j * padded + i, load_some(dprevious + at + j * points + i, points - i));
            }
        for (ptrdiff_t l = layers - 1; l >= 0; l--) {
            const float *K = w[3 * l] + c * m * D, *a = w[3 * l + 1] + c * m, *b = w[3 * l + 2] + c * m;
            float *dK = dw[3 * l] + c * m * D, *da = dw[3 * l + 1] + c * m, *db = dw[3 * l + 2] + c * m;
            const float *y = h + l * step + c * D * padded;
            for (ptrdiff_t k = 0; k < m; k++) {
                V Kk[D], aK[D], R[D], S[D], B = {};
                for (int j = 0; j < D; j++) {
                    Kk[j] = all(K[k * D + j]);
                    aK[j] = Kk[j] * a[k];
                    R[j] = S[j] = (V){};
                }
                for (ptrdiff_t i = 0; i < padded; i += N) {
                    V Y[D], G[D], z = all(b[k]), t = {};
                    for (int j = 0; j < D; j++) {
                        Y[j] = load(y + j * padded + i);
                        G[j] = load(g + j * padded + i);
                        z += Kk[j] * Y[j];
                        t += Kk[j] * G[j];
                    }
                    V u = tanhv(z), v = (1.0f - u * u) * t;
                    B += v;
                    for (int j = 0; j < D; j++) {
                        R[j] += v * Y[j];
                        S[j] += u * G[j];
                        store(f + j * padded + i, load(f + j * padded + i) + aK[j] * v);
                    }
                }
                float found = 0;                                    /* sum of u (K g) = K (sum of u g) */
                for (int j = 0; j < D; j++) {
                    float s = sum(S[j]);
                    found += K[k * D + j] * s;
                    dK[k * D + j] = a[k] * (sum(R[j]) + s);
                }
                da[k] = found;
                db[k] = a[k] * sum(B);
            }
            float *swap = g; g = f; f = swap;                       /* h[l - 1] is in h[l + 1] as it is */
        }
        for (int j = 0; j < D; j++)
            for (ptrdiff_t i = 0; i < points; i += N) {
                store_some(dy + at + j * points + i, load(g + j * padded + i), points - i);
                store_some(dx + at + j * points + i, load(f + j * padded + i), points - i);
            }
    }
}
