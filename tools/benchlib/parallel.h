/* Threads that start together and the clock around them. Shared by the client programs, which are
 * in C so that what is measured is the file system and not the client. A failed call ends the
 * program: a benchmark that goes on after an error measures something else. */
#ifndef PARALLEL_H
#define PARALLEL_H

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define THREADS_MAX 256
#define PATH_BYTES 4096

struct tally {
    long ops;
    long bytes;
};

struct worker {
    int id;
    struct tally (*body)(int id);
    struct tally done;
    pthread_barrier_t *start;
    pthread_t thread;
};

__attribute__((noreturn)) static void die(const char *what, const char *path) {
    fprintf(stderr, "%s %s: %s\n", what, path, strerror(errno));
    exit(1);
}

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    pthread_barrier_wait(worker->start);
    worker->done = worker->body(worker->id);
    return NULL;
}

/* Run `body` in each thread and print `name wall-ns operations bytes`. */
static void run_phase(const char *name, int threads, struct tally (*body)(int id)) {
    static struct worker workers[THREADS_MAX];
    pthread_barrier_t start;
    struct tally total = {0, 0};
    if (threads < 1 || threads > THREADS_MAX) {
        fprintf(stderr, "threads must be 1 to %d\n", THREADS_MAX);
        exit(2);
    }
    pthread_barrier_init(&start, NULL, threads + 1);
    for (int id = 0; id < threads; id++) {
        workers[id] = (struct worker){.id = id, .body = body, .start = &start};
        if (pthread_create(&workers[id].thread, NULL, worker_main, &workers[id]))
            die("pthread_create", "");
    }
    long begin = now_ns();
    pthread_barrier_wait(&start);
    for (int id = 0; id < threads; id++) {
        pthread_join(workers[id].thread, NULL);
        total.ops += workers[id].done.ops;
        total.bytes += workers[id].done.bytes;
    }
    printf("%s %ld %ld %ld\n", name, now_ns() - begin, total.ops, total.bytes);
    fflush(stdout);
    pthread_barrier_destroy(&start);
}

#endif
