/* The loss of a linear-chain CRF with its gradient, as plain C.

   One sentence after the other, by the scaled forward-backward algorithm (Rabiner 1989,
   V.A) in double precision, on float emissions. Inner loops run over tags and add rows,
   so that a compiler vectorises them. benchmarks/crf.py compiles this as a floor.

   emissions, gradient       (batch, tokens, tags)
   gold                      (batch, tokens)
   lengths, weights, losses  (batch)
   start, end                (tags), and their gradients
   transitions               (tags, tags) [from, to], and their gradients

   The gradients are those of sum(weights * losses). Returns 0, or 1 without memory. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Divide a row by its sum; return the sum. */
static double normalise(double *restrict row, int64_t tags)
{
    double total = 0.0;
    for (int64_t j = 0; j < tags; j++) total += row[j];
    const double scale = 1.0 / total;
    for (int64_t j = 0; j < tags; j++) row[j] *= scale;
    return total;
}

/* Set out to row @ matrix. */
static void multiply(
    const double *restrict row, const double *restrict matrix, double *restrict out,
    int64_t tags)
{
    for (int64_t j = 0; j < tags; j++) out[j] = 0.0;
    for (int64_t i = 0; i < tags; i++) {
        const double a = row[i];
        const double *restrict m = matrix + i * tags;
        for (int64_t j = 0; j < tags; j++) out[j] += a * m[j];
    }
}

int loss_with_gradient(
    int64_t batch, int64_t tokens, int64_t tags, const float *emissions,
    const int64_t *lengths, const int64_t *gold, const float *weights,
    const float *start, const float *transitions, const float *end, float *losses,
    float *gradient, float *of_start, float *of_transitions, float *of_end)
{
    const int64_t square = tags * tags;
    double *memory = malloc(sizeof(double) * (3 * tokens * tags + 4 * square + 6 * tags));
    if (!memory) return 1;
    double *factors = memory, *alpha = factors + tokens * tags;
    double *after = alpha + tokens * tags, *matrix = after + tokens * tags;
    double *transposed = matrix + square, *pairs = transposed + square;
    double *sum_pairs = pairs + square, *first = sum_pairs + square;
    double *last = first + tags, *beta = last + tags, *sum_start = beta + tags;
    double *sum_end = sum_start + tags;

    for (int64_t i = 0; i < tags; i++) {
        first[i] = exp(start[i]);
        last[i] = exp(end[i]);
        sum_start[i] = sum_end[i] = 0.0;
        for (int64_t j = 0; j < tags; j++) {
            matrix[i * tags + j] = exp(transitions[i * tags + j]);
            transposed[j * tags + i] = matrix[i * tags + j];
        }
    }
    memset(sum_pairs, 0, sizeof(double) * square);
    memset(gradient, 0, sizeof(float) * batch * tokens * tags);

    for (int64_t n = 0; n < batch; n++) {
        const float *x = emissions + n * tokens * tags;
        const int64_t *y = gold + n * tokens, length = lengths[n];
        const double weight = weights[n];
        float *out = gradient + n * tokens * tags;
        double log_z = 0.0, score = 0.0;
        memset(pairs, 0, sizeof(double) * square);

        for (int64_t t = 0; t < length; t++) {
            double *f = factors + t * tags, *a = alpha + t * tags, top = x[t * tags];
            for (int64_t j = 1; j < tags; j++)
                top = x[t * tags + j] > top ? x[t * tags + j] : top;
            for (int64_t j = 0; j < tags; j++) f[j] = exp(x[t * tags + j] - top);
            if (t == 0) memcpy(a, first, sizeof(double) * tags);
            else multiply(a - tags, matrix, a, tags);
            for (int64_t j = 0; j < tags; j++) a[j] *= f[j];
            log_z += top + log(normalise(a, tags));
            score += x[t * tags + y[t]];
            score += t ? transitions[y[t - 1] * tags + y[t]] : start[y[0]];
        }
        double total = 0.0;
        for (int64_t j = 0; j < tags; j++) total += alpha[(length - 1) * tags + j] * last[j];
        losses[n] = log_z + log(total) - score - end[y[length - 1]];

        for (int64_t t = length - 1; t >= 0; t--) {
            double *a = alpha + t * tags, *f = factors + t * tags, *b = after + t * tags;
            if (t == length - 1) memcpy(beta, last, sizeof(double) * tags);
            else multiply(b + tags, transposed, beta, tags);
            double norm = 0.0;
            for (int64_t j = 0; j < tags; j++) norm += a[j] * beta[j];
            norm = 1.0 / norm;
            for (int64_t j = 0; j < tags; j++) a[j] *= norm;
            if (t < length - 1)
                for (int64_t i = 0; i < tags; i++)
                    for (int64_t j = 0; j < tags; j++)
                        pairs[i * tags + j] += a[i] * b[tags + j];
            for (int64_t j = 0; j < tags; j++) b[j] = beta[j] * f[j];
            normalise(b, tags);
            for (int64_t j = 0; j < tags; j++) beta[j] *= a[j];
            beta[y[t]] -= 1.0;
            for (int64_t j = 0; j < tags; j++) out[t * tags + j] = weight * beta[j];
            if (t == length - 1)
                for (int64_t j = 0; j < tags; j++) sum_end[j] += weight * beta[j];
            if (t == 0)
                for (int64_t j = 0; j < tags; j++) sum_start[j] += weight * beta[j];
        }
        for (int64_t k = 0; k < square; k++) sum_pairs[k] += weight * pairs[k] * matrix[k];
        for (int64_t t = 1; t < length; t++) sum_pairs[y[t - 1] * tags + y[t]] -= weight;
    }
    for (int64_t j = 0; j < tags; j++) of_start[j] = sum_start[j];
    for (int64_t j = 0; j < tags; j++) of_end[j] = sum_end[j];
    for (int64_t k = 0; k < square; k++) of_transitions[k] = sum_pairs[k];
    free(memory);
    return 0;
}
