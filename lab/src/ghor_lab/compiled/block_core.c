/* A block of the transformer, z = attention(x), y = z + tanh(A z + b), forward and backward, each in one pass.

   x, y and their gradients are (images, D, T): an image is D = H C features (all heads) of T tokens. M is (3 D, D): the
   projections of Q (with the scale), K and V. With A = NULL it is the attention alone, y = z. H, C and T (a power of
   two) are given by the compiler's command line.

   The images go through the whole formula in groups of G, while they are in the processor's cache. A vector holds one
   feature of W tokens. Nothing but x is kept for the backward pass: to compute the rest again is as fast as to read it
   from memory. Images b0 <= b < b1 are done; one call a thread. */

#include <stddef.h>
#include <string.h>

#if defined __AVX512F__         /* numbers in a register; registers, of which a product fills three quarters */
enum { WIDEST = 16, REGISTERS = 32 };
#elif defined __AVX__
enum { WIDEST = 8, REGISTERS = 16 };
#else
enum { WIDEST = 4, REGISTERS = 16 };
#endif

enum {
    D = H * C,
    W = T < WIDEST ? T : WIDEST,
    G = T < 16 ? 4 : 64 / T,
    L = G * T,                  /* tokens of a group */
    E = (D + W) / W * W,        /* D + 1, filled up to whole vectors */
    ROWS = 6,
    COLUMNS = REGISTERS / 8 * W
};

typedef float V __attribute__((vector_size(4 * W)));
typedef int I __attribute__((vector_size(4 * W)));

/* sizes are constants of the caller: every call has code of its own */
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

INLINE V load(const float *p) { V v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, V v) { memcpy(p, &v, sizeof v); }
INLINE V all(float x) { return x - (V){}; }             /* keeps -0 */
INLINE V larger(V a, V b) { I m = a > b; return (V)(((I)a & m) | ((I)b & ~m)); } /* b if one is not a number */

/* exp(x) = 2^n (1 + p), p = exp(r) - 1 by its series, |r| <= ln(2)/2; returns 2^n. For |x| <= 87 */
INLINE V power(V x, V *p) {
    V shifted = x * 1.44269504f + 12583039.0f;          /* 3 2^22 + 127 + n: the low bits are the exponent of 2^n */
    V n = shifted - 12583039.0f;
    V r = x - n * 0.693145752f - n * 1.42860677e-6f;    /* ln(2) in two parts */
    V q = all(1.98412698e-4f);
    q = q * r + 1.38888889e-3f;
    q = q * r + 8.33333333e-3f;
    q = q * r + 4.16666667e-2f;
    q = q * r + 1.66666667e-1f;
    q = q * r + 0.5f;
    *p = q * (r * r) + r;
    return (V)((I)shifted << 23);
}

/* for x <= 0; below -87 it is exp(-87), which no sum of ours sees */
INLINE V expv(V x) {
    V p, s = power(larger(all(-87.0f), x), &p);
    return s * p + s;
}

/* w / (w + 2) with w = exp(2 |x|) - 1, and the sign of x; from 10 on it is 1 in float32 */
INLINE V tanhv(V x) {
    V y = -larger(all(-10.0f), (V)((I)x | (I)all(-0.0f)));
    V p, s = power(y + y, &p), w = s * p + (s - 1.0f);
    return (V)((I)(w / (w + 2.0f)) | ((I)x & (I)all(-0.0f)));
}

/* `rows` x `columns` of the product below, in registers */
INLINE void tile(int rows, int columns, int K, const float *a, int row, int step, const float *b, int next, float *out,
                 int down, int add) {
    V s[ROWS][COLUMNS / W];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns / W; j++) s[i][j] = add ? load(out + i * down + j * W) : (V){};
    for (int k = 0; k < K; k++)
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int j = 0; j < columns / W; j++)
                s[i][j] += load(b + k * next + j * W) * a[i * row + k * step];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < columns / W; j++) store(out + i * down + j * W, s[i][j]);
}

INLINE void strip(int columns, int rows, int K, const float *a, int row, int step, const float *b, int next,
                  float *out, int down, int add) {
    int i = 0;
    for (; i + ROWS <= rows; i += ROWS) tile(ROWS, columns, K, a + i * row, row, step, b, next, out + i * down, down, add);
    tile(rows % ROWS, columns, K, a + i * row, row, step, b, next, out + i * down, down, add);
}

/* out[i down + j] = sum over k < K of a[i row + k step] b[k next + j], for i < rows and j < columns; added if `add` */
INLINE void product(int rows, int columns, int K, const float *a, int row, int step, const float *b, int next,
                    float *out, int down, int add) {
    int j = 0;
    for (; j + COLUMNS <= columns; j += COLUMNS) strip(COLUMNS, rows, K, a, row, step, b + j, next, out + j, down, add);
    strip(columns % COLUMNS, rows, K, a, row, step, b + j, next, out + j, down, add);
}

/* W x W. By blocks of 1, 2, 4, ...: swap the upper right block of every pair of rows with the lower left one */
INLINE void transpose(V *X) {
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
    UNROLL for (int w = 1; w < W; w *= 2) {
        I other = ((at & w) != 0) & (W - w);
        UNROLL for (int i = 0; i < W; i++)
            if (!(i & w)) {
                V a = X[i], b = X[i + w];
                X[i] = __builtin_shuffle(a, b, at + other);
                X[i + w] = __builtin_shuffle(a, b, at + other + w);
            }
    }
#endif
}

/* of a group, aligned as torch's memory is; what is (features, L) has the tokens of all its images in a row */
struct work {
    float x[D * L], qkv[3 * D * L], z[D * L], u[D * L], dz[D * L], dqkv[3 * D * L];
    float turned[L * E];
    V P[H * G * T / W][T];      /* for each head, image and W queries: the probabilities of the keys */
};

ptrdiff_t work_size(void) { return sizeof(struct work); }
ptrdiff_t gradient_columns(void) { return E; }

/* images b, b + 1, ...; beyond b1 the last is repeated, so that they are as good numbers as the others */
static void get(const float *x, ptrdiff_t b, ptrdiff_t b1, float *group) {
    for (int g = 0; g < G; g++)
        for (int f = 0; f < D; f++)
            memcpy(group + f * L + g * T, x + ((b + g < b1 ? b + g : b1 - 1) * D + f) * T, 4 * T);
}

static void put(float *x, ptrdiff_t b, ptrdiff_t b1, const float *group) {
    for (int g = 0; g < G && b + g < b1; g++)
        for (int f = 0; f < D; f++) memcpy(x + ((b + g) * D + f) * T, group + f * L + g * T, 4 * T);
}

/* W queries over the keys k: softmax needs no reduction inside a vector. A score that is not a number, or infinite and
   the largest, makes all probabilities of its query not a number */
INLINE void probabilities(const float *q, const float *k, V *P) {
    V Q[C], S[T], sum = {};
    for (int c = 0; c < C; c++) Q[c] = load(q + c * L);
    for (int j = 0; j < T; j++) {
        S[j] = Q[0] * k[j];
        for (int c = 1; c < C; c++) S[j] += Q[c] * k[c * L + j];
    }
    V top = S[0];
    for (int j = 1; j < T; j++) top = larger(S[j], top);
    for (int j = 0; j < T; j++) { S[j] = expv(S[j] - top); sum += S[j]; }
    V scale = 1.0f / sum;
    for (int j = 0; j < T; j++) P[j] = S[j] * scale;
}

/* qkv = M x, z = concat_h softmax(Q_h^T K_h) V_h */
static void attend(struct work *w, const float *M) {
    product(3 * D, L, D, M, D, 1, w->x, L, w->qkv, L, 0);
    V (*P)[T] = w->P;
    for (int h = 0; h < H; h++)
        for (int u = 0; u < L; u += W, P++) {                       /* queries, and the first key of their image */
            const float *q = w->qkv + h * C * L + u, *k = w->qkv + (D + h * C) * L + u / T * T, *v = k + D * L;
            probabilities(q, k, *P);
            for (int c = 0; c < C; c++) {
                V s = (*P)[0] * v[c * L];
                for (int j = 1; j < T; j++) s += (*P)[j] * v[c * L + j];
                store(w->z + (h * C + c) * L + u, s);
            }
        }
}

/* dqkv from dz */
static void attend_back(struct work *w) {
    V (*kept)[T] = w->P;
    for (int h = 0; h < H; h++)
        for (int u = 0; u < L; u += W, kept++) {
            const int at = h * C * L + u, keys = (D + h * C) * L + u / T * T;
            const float *q = w->qkv + at, *k = w->qkv + keys, *v = k + D * L, *g = w->dz + at;
            float *dk = w->dqkv + keys, *dv = dk + D * L;
            V Q[C], P[T], S[T], delta = {};
            for (int c = 0; c < C; c++) Q[c] = load(g + c * L);
            for (int j = 0; j < T; j++) {                           /* dP, and the sum over keys of P dP */
                V s = Q[0] * v[j];
                for (int c = 1; c < C; c++) s += Q[c] * v[c * L + j];
                S[j] = s;
                P[j] = (*kept)[j];
                delta += P[j] * s;
            }
            for (int j = 0; j < T; j++) S[j] = P[j] * (S[j] - delta);
            for (int c = 0; c < C; c++) {
                V s = S[0] * k[c * L];
                for (int j = 1; j < T; j++) s += S[j] * k[c * L + j];
                store(w->dqkv + at + c * L, s);
            }
            for (int j = 0; j < T; j += W) {                        /* from here on a vector holds W keys */
                transpose(S + j);
                transpose(P + j);
                for (int c = 0; c < C; c++) {
                    V s = S[j] * q[c * L], p = P[j] * g[c * L];
                    for (int i = 1; i < W; i++) { s += S[j + i] * q[c * L + i]; p += P[j + i] * g[c * L + i]; }
                    if (u % T) { s += load(dk + c * L + j); p += load(dv + c * L + j); }
                    store(dk + c * L + j, s);
                    store(dv + c * L + j, p);
                }
            }
        }
}

/* (tokens, E): x transposed, then a column of ones, with which a product is a sum over tokens, then zeros */
static void turn(const float *x, float *turned) {
    for (int t = 0; t < L; t += W)
        for (int f = 0; f < E; f += W) {
            V X[W];
            for (int i = 0; i < W; i++) X[i] = f + i < D ? load(x + (f + i) * L + t) : all(f + i == D);
            transpose(X);
            for (int i = 0; i < W; i++) store(turned + (t + i) * E + f, X[i]);
        }
}

void forward(const float *x, const float *M, const float *A, const float *b, float *y, struct work *w, ptrdiff_t b0,
             ptrdiff_t b1) {
    for (ptrdiff_t i = b0; i < b1; i += G) {
        get(x, i, b1, w->x);
        attend(w, M);
        if (A) {
            product(D, L, D, A, D, 1, w->z, L, w->u, L, 0);
            for (int f = 0; f < D; f++)
                for (int t = f * L; t < f * L + L; t += W)
                    store(w->z + t, load(w->z + t) + tanhv(load(w->u + t) + b[f]));
        }
        put(y, i, b1, w->z);
    }
}

/* the gradients of M and [A b], (4 D, E), are added to dM; columns of dM that are not theirs have no meaning */
static void backward_group(const float *x, const float *M, const float *A, const float *b, const float *dy, float *dx,
                           float *dM, struct work *w, ptrdiff_t i, ptrdiff_t b1) {
    get(x, i, b1, w->x);
    get(dy, i, b1, w->dz);
    for (int f = 0; i + G > b1 && f < D; f++) memset(w->dz + f * L + (b1 - i) * T, 0, 4 * (i + G - b1) * T);
    attend(w, M);
    if (A) {
        product(D, L, D, A, D, 1, w->z, L, w->u, L, 0);
        for (int f = 0; f < D; f++)
            for (int t = f * L; t < f * L + L; t += W) {
                V u = tanhv(load(w->u + t) + b[f]);
                store(w->u + t, (1.0f - u * u) * load(w->dz + t));
            }
        product(D, L, D, A, 1, D, w->u, L, w->dz, L, 1);
        turn(w->z, w->turned);
        product(D, E, L, w->u, L, 1, w->turned, E, dM + 3 * D * E, E, 1);
    }
    attend_back(w);
    turn(w->x, w->turned);
    product(3 * D, E, L, w->dqkv, L, 1, w->turned, E, dM, E, 1);
    if (dx) {
        product(D, L, 3 * D, M, 1, D, w->dqkv, L, w->x, L, 0);
        put(dx, i, b1, w->x);
    }
}

/* dx may be NULL. dM is (chunks, 4 D, E): a sum over images is made for each `chunk` of them, within one call, in one
   order. Chunks c0 <= c < c1 are done */
void backward(const float *x, const float *M, const float *A, const float *b, const float *dy, float *dx, float *dM,
              struct work *w, ptrdiff_t images, ptrdiff_t chunk, ptrdiff_t c0, ptrdiff_t c1) {
    for (ptrdiff_t c = c0; c < c1; c++) {
        const ptrdiff_t end = (c + 1) * chunk < images ? (c + 1) * chunk : images;
        float *to = memset(dM + c * 4 * D * E, 0, 4 * 4 * D * E);
        for (ptrdiff_t i = c * chunk; i < end; i += G) backward_group(x, M, A, b, dy, dx, to, w, i, end);
    }
}

/* the sum over the chunks, into the first */
void add_up(float *dM, ptrdiff_t chunks) {
    for (ptrdiff_t c = 1; c < chunks; c++)
        for (int j = 0; j < 4 * D * E; j += W) store(dM + j, load(dM + j) + load(dM + c * 4 * D * E + j));
}
