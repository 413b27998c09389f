/* Reader in place of llmc/dataloader.h: int32 rows of T + 1 tokens, in the order of the steps. Rows do not continue
   each other, as the batches of llm.c's own reader do. It also writes what the model received. */
#ifndef DATALOADER_H
#define DATALOADER_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "llmc/utils.h"

typedef struct {
    size_t B, T, num_tokens;
    FILE* file;
    int* row;
    int* inputs;
    int* targets;
} DataLoader;

void dataloader_init(DataLoader* loader, const char* path, size_t B, size_t T, int rank, int ranks, int shuffle) {
    loader->B = B;
    loader->T = T;
    loader->file = fopenCheck(path, "rb");
    fseekCheck(loader->file, 0, SEEK_END);
    loader->num_tokens = ftell(loader->file) / ((T + 1) * sizeof(int)) * T;
    fseekCheck(loader->file, 0, SEEK_SET);
    loader->row = (int*)mallocCheck((T + 1) * sizeof(int));
    loader->inputs = (int*)mallocCheck(B * T * sizeof(int));
    loader->targets = (int*)mallocCheck(B * T * sizeof(int));
}

void dataloader_reset(DataLoader* loader) { fseekCheck(loader->file, 0, SEEK_SET); }

void dataloader_next_batch(DataLoader* loader) {
    for (size_t b = 0; b < loader->B; b++) {
        freadCheck(loader->row, sizeof(int), loader->T + 1, loader->file);
        memcpy(loader->inputs + b * loader->T, loader->row, loader->T * sizeof(int));
        memcpy(loader->targets + b * loader->T, loader->row + 1, loader->T * sizeof(int));
    }
}

void dataloader_free(DataLoader* loader) {
    free(loader->row);
    free(loader->inputs);
    free(loader->targets);
    fcloseCheck(loader->file);
}

/* Append the input tokens of a step, as the model keeps them for its backward pass, to inputs.bin. */
void write_inputs(const int* inputs, size_t count) {
    FILE* file = fopenCheck("inputs.bin", "ab");
    if (fwrite(inputs, sizeof(int), count, file) != count) { exit(EXIT_FAILURE); }
    fcloseCheck(file);
}

/* Return the peak resident set of this program in KiB, or 0 where there is no /proc. The peak that wait4 reports can be
   that of the process that started the program. */
long peak_memory(void) {
    char line[256];
    long peak = 0;
    FILE* file = fopen("/proc/self/status", "r");
    if (file == NULL) { return 0; }
    while (fgets(line, sizeof(line), file)) {
        if (sscanf(line, "VmHWM: %ld", &peak) == 1) { break; }
    }
    fclose(file);
    return peak;
}

#endif
