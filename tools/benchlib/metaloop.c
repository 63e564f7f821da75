/* Metadata operations in a loop: metaloop ROOT THREADS COUNT own|shared[+N] PHASE...
 *
 * Each thread works on COUNT names, in a directory of its own or in one that all share. Phases run
 * in the order given; each prints `phase wall-ns operations 0`. A phase may be given twice.
 * Programs that share a directory say `shared+N`, each with another N for its names. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "parallel.h"

#define FILES_PER_DIRECTORY 1000 /* of `fill` */

static const char *root;
static int threads;
static long count;
static int shared;
static int first;

static void directory_of(char *path, int id) {
    snprintf(path, PATH_BYTES, "%s/%d", root, shared ? 0 : id);
}

static void name_of(char *path, int id, char kind, long number) {
    int whose = first + id;
    snprintf(path, PATH_BYTES, "%s/%d/%c%d-%06ld", root, shared ? 0 : id, kind, whose, number);
}

static struct tally do_mkdir(int id) {
    char path[PATH_BYTES];
    for (long i = 0; i < count; i++) {
        name_of(path, id, 'd', i);
        if (mkdir(path, 0755)) die("mkdir", path);
    }
    return (struct tally){count, 0};
}

static struct tally do_rmdir(int id) {
    char path[PATH_BYTES];
    for (long i = 0; i < count; i++) {
        name_of(path, id, 'd', i);
        if (rmdir(path)) die("rmdir", path);
    }
    return (struct tally){count, 0};
}

static struct tally do_create(int id) {
    char path[PATH_BYTES];
    for (long i = 0; i < count; i++) {
        name_of(path, id, 'f', i);
        int fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0644);
        if (fd < 0) die("create", path);
        if (close(fd)) die("close", path);
    }
    return (struct tally){count, 0};
}

static struct tally do_stat(int id) {
    char path[PATH_BYTES];
    struct stat attributes;
    for (long i = 0; i < count; i++) {
        name_of(path, id, 'f', i);
        if (stat(path, &attributes)) die("stat", path);
    }
    return (struct tally){count, 0};
}

static struct tally do_open(int id) {
    char path[PATH_BYTES];
    for (long i = 0; i < count; i++) {
        name_of(path, id, 'f', i);
        int fd = open(path, O_RDONLY);
        if (fd < 0) die("open", path);
        if (close(fd)) die("close", path);
    }
    return (struct tally){count, 0};
}

/* What `ls -l` does; an operation is one entry, read and lstat-ed. */
static struct tally do_ls(int id) {
    char path[PATH_BYTES];
    struct stat attributes;
    struct dirent *entry;
    long seen = 0;
    directory_of(path, id);
    DIR *directory = opendir(path);
    if (!directory) die("opendir", path);
    while ((entry = readdir(directory))) {
        if (entry->d_name[0] == '.') continue;
        if (fstatat(dirfd(directory), entry->d_name, &attributes, AT_SYMLINK_NOFOLLOW))
            die("lstat", entry->d_name);
        seen++;
    }
    closedir(directory);
    if (seen != (shared ? count * threads : count)) {
        fprintf(stderr, "%s lists %ld entries\n", path, seen);
        exit(1);
    }
    return (struct tally){seen, 0};
}

static struct tally do_rename(int id) {
    char from[PATH_BYTES], to[PATH_BYTES];
    for (long i = 0; i < count; i++) {
        name_of(from, id, 'f', i);
        name_of(to, id, 'r', i);
        if (rename(from, to)) die("rename", from);
    }
    return (struct tally){count, 0};
}

static struct tally do_unlink(int id) {
    char path[PATH_BYTES];
    for (long i = 0; i < count; i++) {
        name_of(path, id, 'r', i);
        if (unlink(path)) die("unlink", path);
    }
    return (struct tally){count, 0};
}

/* One-block files in directories of FILES_PER_DIRECTORY, as data sets have them. */
static struct tally do_fill(int id) {
    char path[PATH_BYTES];
    char content[100];
    memset(content, 'x', sizeof content);
    for (long i = 0; i < count; i++) {
        long directory = i / FILES_PER_DIRECTORY;
        snprintf(path, PATH_BYTES, "%s/%d/%04ld", root, id, directory);
        if (i % FILES_PER_DIRECTORY == 0 && mkdir(path, 0755)) die("mkdir", path);
        snprintf(path, PATH_BYTES, "%s/%d/%04ld/%08ld.jpg", root, id, directory, i);
        int fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0644);
        if (fd < 0) die("create", path);
        if (write(fd, content, sizeof content) != sizeof content) die("write", path);
        if (close(fd)) die("close", path);
    }
    return (struct tally){count, count * (long)sizeof content};
}

static const struct {
    const char *name;
    struct tally (*body)(int id);
} PHASES[] = {
    {"mkdir", do_mkdir}, {"rmdir", do_rmdir},   {"create", do_create},
    {"stat", do_stat},   {"open", do_open},     {"ls", do_ls},
    {"fill", do_fill},   {"rename", do_rename}, {"unlink", do_unlink},
};

static void make_directories(void) {
    char path[PATH_BYTES];
    if (mkdir(root, 0755) && errno != EEXIST) die("mkdir", root);
    for (int id = 0; id < (shared ? 1 : threads); id++) {
        directory_of(path, id);
        if (mkdir(path, 0755) && errno != EEXIST) die("mkdir", path);
    }
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: metaloop ROOT THREADS COUNT own|shared PHASE...\n");
        return 2;
    }
    root = argv[1];
    threads = atoi(argv[2]);
    count = atol(argv[3]);
    shared = strncmp(argv[4], "shared", 6) == 0;
    first = shared && argv[4][6] == '+' ? atoi(argv[4] + 7) : 0;
    make_directories();
    for (int i = 5; i < argc; i++) {
        size_t known = 0;
        while (known < sizeof PHASES / sizeof *PHASES && strcmp(PHASES[known].name, argv[i]))
            known++;
        if (known == sizeof PHASES / sizeof *PHASES) {
            fprintf(stderr, "no phase %s\n", argv[i]);
            return 2;
        }
        run_phase(argv[i], threads, PHASES[known].body);
    }
    return 0;
}
