/* Gradients of a convolution (stride 1, one group, no padding) whose output goes through a 2x2 max-pool.

   Only one of four outputs has won its window, so three quarters of the gradient before the pool are zero, and a dense
   kernel spends three quarters of its time on zeros. Here each winner is one "hit": the patch of the input under it,
   times its slope, is added to its filter's gradient, and its filter, times its slope, to the patch's gradient. A patch
   is KH rows of KW·CIN contiguous values: everything is channels last.

   Compiled by native.py for each KH, KW and CIN; KW·CIN is a multiple of 16. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 24 /* vectors that a loop may keep in registers */
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 12
#else
#define LANES 4
#define REGISTERS 12
#endif
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define ROW (KW * CIN)
#define ACROSS (ROW / LANES) /* vectors in a row of a patch */
#define PATCH (KH * ACROSS)
#define FITS(part) (ACROSS % (part) == 0 && ACROSS / (part) <= REGISTERS)
#define PIECE (FITS(1) ? ACROSS : FITS(2) ? ACROSS / 2 : FITS(3) ? ACROSS / 3 : FITS(4) ? ACROSS / 4 : 1)
#define CHUNK (PATCH <= REGISTERS ? PATCH : PIECE)
#define UNROLLED _Pragma("GCC unroll 32")

#define WINDOWS 24 /* for which loading and storing a filter's gradient pays off; their rows stay in the L1 cache */

typedef struct {
    int32_t place; /* offset of its patch in the image */
    float slope;
} hit;

/* Return the offset of vector number `i` of a patch in an image of this width. */
static inline long at(long i, long width) { return i / ACROSS * width * CIN + i % ACROSS * LANES; }

/* List the hits of windows [first, last) by channel: those of channel c start at hits[c * most]; counts[c] of them. */
static void by_channel(const float *gy, const uint8_t *where, long first, long last, long across, long width,
                       long channels, long most, hit *restrict hits, int32_t *restrict counts) {
    memset(counts, 0, channels * sizeof *counts);
    for (long window = first; window < last; window++) {
        const float *slopes = gy + window * channels;
        const uint8_t *winners = where + window * channels;
        int32_t corner = (window / across * 2 * width + window % across * 2) * CIN;
        int32_t places[4] = {corner, corner + CIN, corner + width * CIN, corner + (width + 1) * CIN};
        for (long c = 0; c < channels; c++) {
            hits[c * most + counts[c]] = (hit){places[winners[c]], slopes[c]};
            counts[c] += slopes[c] != 0;
        }
    }
}

/* Compute gw[filter] += Σ slope · patch. */
static void add_to_filter(float *gw, const float *x, const hit *hits, long count, long width) {
    for (long from = 0; from < PATCH; from += CHUNK) {
        vector sum[CHUNK];
        UNROLLED for (long i = 0; i < CHUNK; i++) sum[i] = *(vector *)(gw + (from + i) * LANES);
        for (long h = 0; h < count; h++) {
            const float *patch = x + hits[h].place;
            UNROLLED for (long i = 0; i < CHUNK; i++) sum[i] +=
                hits[h].slope * *(const vector *)(patch + at(from + i, width));
        }
        UNROLLED for (long i = 0; i < CHUNK; i++) *(vector *)(gw + (from + i) * LANES) = sum[i];
    }
}

/* Add the gradient by the filters to gw [channels, KH, KW, CIN]. x [images, height, width, CIN]; gy and where [images,
   windows, channels]; `scratch` holds 8 · channels · (windows of a row + WINDOWS) bytes, `counts` channels numbers. */
void weight_grad(const float *x, const float *gy, const uint8_t *where, float *gw, long images, long height,
                 long width, long channels, hit *scratch, int32_t *counts) {
    long across = (width - KW + 1) / 2, windows = (height - KH + 1) / 2 * across;
    long band = (WINDOWS + across - 1) / across * across;
    for (long n = 0; n < images; n++)
        for (long first = 0; first < windows; first += band) {
            long last = first + band < windows ? first + band : windows;
            by_channel(gy + n * windows * channels, where + n * windows * channels, first, last, across, width,
                       channels, band, scratch, counts);
            for (long c = 0; c < channels; c++)
                add_to_filter(gw + c * KH * ROW, x + n * height * width * CIN, scratch + c * band, counts[c], width);
        }
}

/* List the channels of a window by the place where they won: those of place k start at won[k * channels]. */
static void by_place(const float *slopes, const uint8_t *winners, long channels, uint16_t *won, int32_t *counts) {
    uint16_t *ends[4];
    for (long k = 0; k < 4; k++) ends[k] = won + k * channels;
    for (long c = 0; c < channels; c++) {
        uint16_t *end = ends[winners[c]];
        *end = c;
        ends[winners[c]] = end + (slopes[c] != 0);
    }
    for (long k = 0; k < 4; k++) counts[k] = ends[k] - (won + k * channels);
}

/* Add to one row of a patch's gradient: Σ slope · that row of the filters that won here. */
static void add_to_row(float *gx, const float *slopes, const uint16_t *won, long count, const float *filters) {
    for (long from = 0; from < ACROSS; from += PIECE) {
        vector sum[PIECE];
        UNROLLED for (long i = 0; i < PIECE; i++) sum[i] = *(vector *)(gx + (from + i) * LANES);
        for (long h = 0; h < count; h++) {
            const float *filter = filters + won[h] * (long)ROW;
            UNROLLED for (long i = 0; i < PIECE; i++) sum[i] +=
                slopes[won[h]] * *(const vector *)(filter + (from + i) * LANES);
        }
        UNROLLED for (long i = 0; i < PIECE; i++) *(vector *)(gx + (from + i) * LANES) = sum[i];
    }
}

/* Add the gradient by the input to gx [images, height, width, CIN]. Filters come row by row, [KH, channels, KW, CIN]:
   one row of all of them stays in the L1 cache. `won` holds 4 · windows · channels numbers, `counts` 4 · windows. */
void input_grad(const float *filters, const float *gy, const uint8_t *where, float *gx, long images, long height,
                long width, long channels, uint16_t *won, int32_t *counts) {
    long across = (width - KW + 1) / 2, windows = (height - KH + 1) / 2 * across;
    for (long n = 0; n < images; n++) {
        const float *slopes = gy + n * windows * channels;
        for (long window = 0; window < windows; window++)
            by_place(slopes + window * channels, where + (n * windows + window) * channels, channels,
                     won + window * 4 * channels, counts + window * 4);
        for (long row = 0; row < KH; row++)
            for (long window = 0; window < windows; window++)
                for (long k = 0; k < 4; k++) {
                    long top = window / across * 2 + k / 2 + row, left = window % across * 2 + k % 2;
                    add_to_row(gx + ((n * height + top) * width + left) * CIN, slopes + window * channels,
                               won + (window * 4 + k) * channels, counts[window * 4 + k],
                               filters + row * channels * ROW);
                }
    }
}

/* Pool: the largest value of each window, and which it was, row by row. The first of equals wins, NaN always does. */
void pool(const float *y, float *values, uint8_t *where, long images, long height, long width, long channels) {
    long down = height / 2, across = width / 2;
    for (long window = 0; window < images * down * across; window++) {
        long n = window / (down * across), i = window / across % down, j = window % across;
        const float *corner = y + ((n * height + 2 * i) * width + 2 * j) * channels;
        const float *others[3] = {corner + channels, corner + width * channels, corner + (width + 1) * channels};
        float *best = values + window * channels;
        uint8_t *winner = where + window * channels;
        for (long c = 0; c < channels; c++) {
            float value = corner[c];
            uint8_t number = 0;
            UNROLLED for (int k = 0; k < 3; k++) {
                int better = others[k][c] > value || others[k][c] != others[k][c];
                value = better ? others[k][c] : value;
                number = better ? k + 1 : number;
            }
            best[c] = value;
            winner[c] = number;
        }
    }
}
