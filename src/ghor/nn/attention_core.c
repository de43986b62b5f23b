/* softmax(Q^T K) V for many small heads, without a layout copy and without writing the scores to memory.

   Q, K, V, O and their gradients lie features first: the row of feature c of head h holds all images and their tokens,
   x[((h * C) + c) * stride + b * T + t]. C (features of a head) and T (tokens, a power of two) are given by the
   compiler's command line. A vector holds one value for each of W queries of an image, so that the softmax over the
   keys needs no reduction inside a vector. The backward pass computes the probabilities again.

   Images b0 <= b < b1 are done; one call a thread. */

#include <stddef.h>
#include <string.h>

enum { W = T < 16 ? T : 16 }; /* wider vectors than a machine has are slow, and take a compiler minutes */
typedef float V __attribute__((vector_size(4 * W)));
typedef int I __attribute__((vector_size(4 * W)));

static inline V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, V v) { memcpy(p, &v, sizeof v); }
static inline V larger(V a, V b) { I m = a > b; return (V)(((I)a & m) | ((I)b & ~m)); } /* b if one is not a number */

/* exp for x <= 0, 1 ulp or so: 2^n exp(r), |r| <= ln(2)/2; below -87 it is exp(-87), which no sum of ours sees */
static inline V expm(V x) {
    x = larger((V){} - 87.0f, x);
    V shifted = x * 1.44269504f + 12582912.0f;           /* rounds to the nearest whole number, in the low bits */
    V n = shifted - 12582912.0f;
    V r = x - n * 0.693145752f - n * 1.42860677e-6f;     /* ln(2) in two parts */
    V p = (V){} + 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    I e = (__builtin_convertvector(n, I) + 127) << 23;
    return p * (V)e;
}

/* a score that is not a number, or infinite and the largest, makes all probabilities of its query not a number */
static inline void probabilities(const V Q[C], const float *K, ptrdiff_t stride, V P[T]) {
    V top, sum = (V){};
    for (int j = 0; j < T; j++) {
        V s = Q[0] * K[j];
        for (int c = 1; c < C; c++) s += Q[c] * K[c * stride + j];
        P[j] = s;
        top = j ? larger(s, top) : s;
    }
    for (int j = 0; j < T; j++) { P[j] = expm(P[j] - top); sum += P[j]; }
    V scale = 1.0f / sum;
    for (int j = 0; j < T; j++) P[j] *= scale;
}

void forward(const float *QKV, float *O, ptrdiff_t heads, ptrdiff_t stride, ptrdiff_t b0, ptrdiff_t b1) {
    for (ptrdiff_t h = 0; h < heads; h++)
        for (ptrdiff_t b = b0; b < b1; b++)
            for (int u = 0; u < T; u += W) {
                const float *q = QKV + h * C * stride + b * T, *k = q + heads * C * stride, *v = k + heads * C * stride;
                float *o = O + h * C * stride + b * T;
                V Q[C], P[T];
                for (int c = 0; c < C; c++) Q[c] = load(q + c * stride + u);
                probabilities(Q, k, stride, P);
                for (int c = 0; c < C; c++) {
                    V s = P[0] * v[c * stride];
                    for (int j = 1; j < T; j++) s += P[j] * v[c * stride + j];
                    store(o + c * stride + u, s);
                }
            }
}

/* W x W. By blocks of 1, 2, 4, ...: swap the upper right block of every pair of rows with the lower left one */
static inline void transpose(V *X) {
#ifdef __clang__ /* has no shuffle by a vector */
    float *x = (float *)X;
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            float a = x[i * W + j];
            x[i * W + j] = x[j * W + i];
            x[j * W + i] = a;
        }
#else
    I at;
    for (int i = 0; i < W; i++) at[i] = i;
#pragma GCC unroll 8
    for (int w = 1; w < W; w *= 2) {
        I other = ((at & w) != 0) & (W - w);
#pragma GCC unroll 64
        for (int i = 0; i < W; i++)
            if (!(i & w)) {
                V a = X[i], b = X[i + w];
                X[i] = __builtin_shuffle(a, b, at + other);
                X[i + w] = __builtin_shuffle(a, b, at + other + w);
            }
    }
#endif
}

void backward(const float *QKV, const float *dO, float *dQKV, ptrdiff_t heads, ptrdiff_t stride, ptrdiff_t b0,
              ptrdiff_t b1) {
    const ptrdiff_t part = heads * C * stride;
    for (ptrdiff_t h = 0; h < heads; h++)
        for (ptrdiff_t b = b0; b < b1; b++)
            for (int u = 0; u < T; u += W) {
                const ptrdiff_t at = h * C * stride + b * T;
                const float *q = QKV + at + u, *k = QKV + at + part, *v = k + part, *g = dO + at + u;
                float *dq = dQKV + at + u, *dk = dQKV + at + part, *dv = dk + part;
                V Q[C], G[C], P[T], S[T], delta = (V){};
                for (int c = 0; c < C; c++) { Q[c] = load(q + c * stride); G[c] = load(g + c * stride); }
                probabilities(Q, k, stride, P);
                for (int j = 0; j < T; j++) {                /* dP, and the sum over keys of P dP */
                    V s = G[0] * v[j];
                    for (int c = 1; c < C; c++) s += G[c] * v[c * stride + j];
                    S[j] = s;
                    delta += P[j] * s;
                }
                for (int j = 0; j < T; j++) S[j] = P[j] * (S[j] - delta);
                for (int c = 0; c < C; c++) {
                    V s = S[0] * k[c * stride];
                    for (int j = 1; j < T; j++) s += S[j] * k[c * stride + j];
                    store(dq + c * stride, s);
                }
                for (int j = 0; j < T; j += W) {             /* from here on a vector holds one value for each of W keys */
                    transpose(S + j);
                    transpose(P + j);
                    for (int c = 0; c < C; c++) {
                        const float *qc = (const float *)&Q[c], *gc = (const float *)&G[c];
                        V s = S[j] * qc[0], w = P[j] * gc[0];
                        for (int i = 1; i < W; i++) { s += S[j + i] * qc[i]; w += P[j + i] * gc[i]; }
                        if (u) { s += load(dk + c * stride + j); w += load(dv + c * stride + j); }
                        store(dk + c * stride + j, s);
                        store(dv + c * stride + j, w);
                    }
                }
            }
}
