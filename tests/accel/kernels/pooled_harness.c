/* Runs the kernels of pooled.c on images of random sizes, in memory of just the size that pooled.py gives them. */

#include <stdio.h>
#include <stdlib.h>

#include "pooled.c"

static void *filled(size_t count, size_t size) {
    float *memory = malloc(count * size);
    if (size == sizeof(float))
        for (size_t i = 0; i < count; i++) memory[i] = rand() % 3 ? rand() / (float)RAND_MAX - 0.5f : 0;
    return memory;
}

static void once(void) {
    long images = 1 + rand() % 3, height = KH + 1 + rand() % 30, width = KW + 1 + rand() % 60, channels = 1 + rand() % 70;
    long rows = height - KH + 1, columns = width - KW + 1, across = columns / 2, windows = rows / 2 * across;
    float *x = filled(images * height * width * CIN, 4), *y = filled(images * rows * columns * channels, 4);
    float *values = filled(images * windows * channels, 4), *gy = filled(images * windows * channels, 4);
    float *filters = filled(KH * KW * CIN * channels, 4), *gw = filled(KH * KW * CIN * channels, 4);
    float *gx = filled(images * height * width * CIN, 4);
    uint8_t *where = filled(images * windows * channels, 1);
    hit *hits = filled(channels * (across + WINDOWS), 8);
    uint16_t *won = filled(channels * windows, 8);
    int32_t *by_filter = filled(channels, 4), *by_window = filled(4 * windows, 4);
    if (rand() % 3 == 0) /* every window counts: the lists are full */
        for (long i = 0; i < images * windows * channels; i++) gy[i] = 1;
    pool(y, values, where, images, rows, columns, channels);
    weight_grad(x, gy, where, gw, images, height, width, channels, hits, by_filter);
    input_grad(filters, gy, where, gx, images, height, width, channels, won, by_window);
    void *all[] = {x, y, values, gy, filters, gw, gx, where, hits, won, by_filter, by_window};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

int main(void) {
    for (int i = 0; i < 40; i++) once();
    puts("ok");
}
