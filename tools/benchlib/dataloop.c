/* File contents in a loop:
 *
 *   dataloop write PATH BYTES IO            sequential writes of IO bytes, fsync, close
 *   dataloop read PATH IO                   sequential reads
 *   dataloop random PATH IO COUNT SEED      COUNT reads at random multiples of IO
 *   dataloop mapped PATH IO COUNT SEED      COUNT records of IO bytes, mapped and in shuffled order
 *   dataloop drop PATH                      drop the kernel's pages of the file (nothing printed)
 *   dataloop writemany DIR THREADS COUNT BYTES
 *   dataloop readmany DIR THREADS COUNT BYTES SEED    in shuffled order, each file once
 *
 * Prints `command wall-ns operations bytes`. Contents don't compress and every 4 KiB begins with
 * the file offset, which reads check: wrong bytes fail the benchmark. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "parallel.h"

#define STAMP_BYTES 4096L

static const char *path;
static long bytes, io, count, seed;
static int threads;
static long *order;

static uint64_t next_random(uint64_t *state) { /* xorshift64*, Vigna 2016 */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 2685821657736338717ULL;
}

static char *noise(long length) {
    long rounded = (length + STAMP_BYTES - 1) / STAMP_BYTES * STAMP_BYTES;
    char *buffer = aligned_alloc(STAMP_BYTES, rounded);
    uint64_t state = 88172645463325252ULL;
    if (!buffer) die("aligned_alloc", "");
    for (long at = 0; at + 8 <= length; at += 8) {
        uint64_t word = next_random(&state);
        memcpy(buffer + at, &word, 8);
    }
    return buffer;
}

static void stamp(char *buffer, long offset, long length) {
    for (long at = 0; at + 8 <= length; at += STAMP_BYTES) {
        uint64_t word = (uint64_t)(offset + at);
        memcpy(buffer + at, &word, 8);
    }
}

static void check(const char *buffer, long offset, const char *name) {
    uint64_t word;
    memcpy(&word, buffer, 8);
    if (word != (uint64_t)offset) {
        fprintf(stderr, "%s: wrong bytes at %ld\n", name, offset);
        exit(1);
    }
}

static void write_all(int fd, char *buffer, long total, long step, const char *name) {
    for (long done = 0; done < total; done += step) {
        long length = total - done < step ? total - done : step;
        stamp(buffer, done, length);
        if (write(fd, buffer, length) != length) die("write", name);
    }
}

static long read_all(int fd, char *buffer, long step, const char *name) {
    long done = 0;
    for (;;) {
        long got = read(fd, buffer, step);
        if (got < 0) die("read", name);
        if (got == 0) return done;
        if (done % STAMP_BYTES == 0 && got >= 8) check(buffer, done, name);
        done += got;
    }
}

static struct tally do_write(int id) {
    (void)id;
    char *buffer = noise(io);
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
    if (fd < 0) die("create", path);
    write_all(fd, buffer, bytes, io, path);
    if (fsync(fd)) die("fsync", path);
    if (close(fd)) die("close", path);
    return (struct tally){(bytes + io - 1) / io, bytes};
}

static struct tally do_read(int id) {
    (void)id;
    char *buffer = noise(io);
    int fd = open(path, O_RDONLY);
    if (fd < 0) die("open", path);
    long done = read_all(fd, buffer, io, path);
    close(fd);
    return (struct tally){(done + io - 1) / io, done};
}

static struct tally do_random(int id) {
    (void)id;
    char *buffer = noise(io);
    uint64_t state = (uint64_t)seed * 2 + 1;
    struct stat attributes;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &attributes)) die("open", path);
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    for (long i = 0; i < count; i++) {
        long offset = (long)(next_random(&state) % (uint64_t)(attributes.st_size / io)) * io;
        if (pread(fd, buffer, io, offset) != io) die("pread", path);
        check(buffer, offset, path);
    }
    close(fd);
    return (struct tally){count, count * io};
}

static void shuffle(long total) {
    uint64_t state = (uint64_t)seed * 2 + 1;
    order = calloc(total, sizeof *order);
    if (!order) die("calloc", "");
    for (long i = 0; i < total; i++) order[i] = i;
    for (long i = total - 1; i > 0; i--) {
        long other = (long)(next_random(&state) % (uint64_t)(i + 1));
        long kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
}

/* As LMDB does when told not to read ahead: the kernel fetches the pages that are touched. */
static struct tally do_mapped(int id) {
    (void)id;
    struct stat attributes;
    char *copy = noise(io);
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &attributes)) die("open", path);
    char *map = mmap(NULL, attributes.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) die("mmap", path);
    if (madvise(map, attributes.st_size, MADV_RANDOM)) die("madvise", path);
    long records = attributes.st_size / io;
    if (count > records) count = records;
    shuffle(records);
    for (long i = 0; i < count; i++) {
        memcpy(copy, map + order[i] * io, io);
        check(copy, order[i] * io, path);
    }
    munmap(map, attributes.st_size);
    close(fd);
    return (struct tally){count, count * io};
}

static int do_drop(void) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) die("open", path);
    errno = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (errno) die("posix_fadvise", path);
    return close(fd);
}

static void member(char *name, long number) {
    snprintf(name, PATH_BYTES, "%s/%03ld/%06ld.bin", path, number / 500, number);
}

static struct tally do_writemany(int id) {
    char name[PATH_BYTES];
    char *buffer = noise(bytes);
    long written = 0;
    for (long number = id; number < count; number += threads, written++) {
        member(name, number);
        int fd = open(name, O_CREAT | O_EXCL | O_WRONLY, 0644);
        if (fd < 0) die("create", name);
        write_all(fd, buffer, bytes, bytes, name);
        if (close(fd)) die("close", name);
    }
    return (struct tally){written, written * bytes};
}

static struct tally do_readmany(int id) {
    char name[PATH_BYTES];
    char *buffer = noise(bytes + 1);
    long files = 0;
    for (long at = id; at < count; at += threads, files++) {
        member(name, order[at]);
        int fd = open(name, O_RDONLY);
        if (fd < 0) die("open", name);
        if (read_all(fd, buffer, bytes + 1, name) != bytes) die("short file", name);
        close(fd);
    }
    return (struct tally){files, files * bytes};
}

static void make_directories(void) {
    char name[PATH_BYTES];
    if (mkdir(path, 0755) && errno != EEXIST) die("mkdir", path);
    for (long number = 0; number < count; number += 500) {
        snprintf(name, PATH_BYTES, "%s/%03ld", path, number / 500);
        if (mkdir(name, 0755) && errno != EEXIST) die("mkdir", name);
    }
}

static long number(int argc, char **argv, int at) {
    if (at >= argc) {
        fprintf(stderr, "dataloop %s: too few arguments\n", argv[1]);
        exit(2);
    }
    return atol(argv[at]);
}

int main(int argc, char **argv) {
    const char *command = argc > 2 ? argv[1] : "";
    path = argc > 2 ? argv[2] : "";
    if (!strcmp(command, "write")) {
        bytes = number(argc, argv, 3), io = number(argc, argv, 4);
        run_phase(command, 1, do_write);
    } else if (!strcmp(command, "read")) {
        io = number(argc, argv, 3);
        run_phase(command, 1, do_read);
    } else if (!strcmp(command, "random") || !strcmp(command, "mapped")) {
        io = number(argc, argv, 3), count = number(argc, argv, 4), seed = number(argc, argv, 5);
        run_phase(command, 1, command[0] == 'r' ? do_random : do_mapped);
    } else if (!strcmp(command, "drop")) {
        return do_drop();
    } else if (!strcmp(command, "writemany") || !strcmp(command, "readmany")) {
        threads = (int)number(argc, argv, 3), count = number(argc, argv, 4);
        bytes = number(argc, argv, 5);
        int writing = command[0] == 'w';
        if (writing) make_directories();
        else seed = number(argc, argv, 6), shuffle(count);
        run_phase(command, threads, writing ? do_writemany : do_readmany);
    } else {
        fprintf(stderr, "usage: see the head of dataloop.c\n");
        return 2;
    }
    return 0;
}
