/* A file system that does nothing: what requests through FUSE cost before anybody serves them.
 *
 *   nothing MOUNTPOINT pages|direct [PORT]
 *
 * With PORT, what makes a file or directory writes two hashes of the Redis there before it is
 * answered, in one round trip: the least that a file system with metadata in Redis can do.
 * One thread reads requests and answers at once. Directories and files can be made and written,
 * through the kernel's pages or past them; no name is found again and no byte is kept. Prints
 * `ready` when it is mounted, and ends when it is unmounted. Structs are of linux/fuse.h. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define INODES_MAX 65536
#define PAGE 4096
#define WRITE_BYTES (1 << 20)
#define FOREVER 3600

static int fd, direct, redis = -1;
static uint64_t inodes = FUSE_ROOT_ID;
static uint64_t sizes[INODES_MAX];
static uint32_t modes[INODES_MAX];

static void answer(uint64_t unique, int error, const void *body, size_t size) {
    struct fuse_out_header head = {.len = sizeof head + size, .error = -error, .unique = unique};
    struct iovec pieces[] = {{&head, sizeof head}, {(void *)body, size}};
    if (writev(fd, pieces, 2) < 0 && errno != ENOENT) perror("nothing: writev");
}

static struct fuse_attr attributes(uint64_t ino) {
    uint64_t at = ino % INODES_MAX;
    return (struct fuse_attr){.ino = ino, .mode = modes[at], .nlink = 1, .size = sizes[at]};
}

static void tell_redis(uint64_t ino) {
    char command[512], reply[64];
    static const char zeros[] = "0000000000000000000000000000000000000000000000000000000000000000";
    int size = snprintf(command, sizeof command,
                        "*4\r\n$4\r\nHSET\r\n$1\r\nd\r\n$16\r\n%016lx\r\n$9\r\n123456789\r\n"
                        "*4\r\n$4\r\nHSET\r\n$17\r\ni%016lx\r\n$1\r\na\r\n$64\r\n%s\r\n",
                        ino, ino, zeros);
    if (write(redis, command, size) != size) _exit(1);
    for (ssize_t got = 0, more; got < 8; got += more) /* two of `:1\r\n` */
        if ((more = read(redis, reply + got, sizeof reply - got)) <= 0) _exit(1);
}

static void use_redis(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    int on = 1;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    redis = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(redis, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(redis, (void *)&at, sizeof at)) {
        perror("nothing: Redis");
        _exit(1);
    }
}

static struct fuse_entry_out made(uint32_t mode) {
    uint64_t ino = ++inodes;
    if (redis >= 0) tell_redis(ino);
    modes[ino % INODES_MAX] = mode, sizes[ino % INODES_MAX] = 0;
    return (struct fuse_entry_out){.nodeid = ino, .entry_valid = FOREVER, .attr_valid = FOREVER,
                                   .attr = attributes(ino)};
}

static void agree(const struct fuse_in_header *in, const struct fuse_init_in *offer) {
    struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = offer->minor,
                                .max_readahead = offer->max_readahead, .max_write = WRITE_BYTES,
                                .max_pages = WRITE_BYTES / PAGE, .max_background = 12,
                                .flags = FUSE_BIG_WRITES | FUSE_MAX_PAGES | FUSE_ATOMIC_O_TRUNC};
    answer(in->unique, 0, &out, sizeof out);
    puts("ready");
    fflush(stdout);
}

static void serve(const struct fuse_in_header *in, const void *body) {
    uint64_t id = in->unique, at = in->nodeid % INODES_MAX;
    switch (in->opcode) {
    case FUSE_INIT: agree(in, body); return;
    case FUSE_FORGET: case FUSE_BATCH_FORGET: case FUSE_INTERRUPT: return;
    case FUSE_LOOKUP: answer(id, ENOENT, NULL, 0); return;
    case FUSE_GETATTR: {
        struct fuse_attr_out out = {.attr_valid = FOREVER, .attr = attributes(in->nodeid)};
        answer(id, 0, &out, sizeof out);
        return;
    }
    case FUSE_MKDIR: {
        struct fuse_entry_out out = made(S_IFDIR | 0755);
        answer(id, 0, &out, sizeof out);
        return;
    }
    case FUSE_CREATE: {
        struct { struct fuse_entry_out entry; struct fuse_open_out open; } out = {
            made(S_IFREG | 0644), {.open_flags = direct ? FOPEN_DIRECT_IO : 0}};
        answer(id, 0, &out, sizeof out);
        return;
    }
    case FUSE_WRITE: {
        const struct fuse_write_in *write = body;
        struct fuse_write_out out = {.size = write->size};
        if (sizes[at] < write->offset + write->size) sizes[at] = write->offset + write->size;
        answer(id, 0, &out, sizeof out);
        return;
    }
    case FUSE_FSYNC: case FUSE_FLUSH: case FUSE_RELEASE: case FUSE_DESTROY:
        answer(id, 0, NULL, 0);
        return;
    default: answer(id, ENOSYS, NULL, 0);
    }
}

int main(int argc, char **argv) {
    char options[64], *request = aligned_alloc(PAGE, WRITE_BYTES + PAGE);
    if (argc < 3 || argc > 4 || !request) return 2;
    if (argc == 4) use_redis(atoi(argv[3]));
    direct = !strcmp(argv[2], "direct");
    modes[FUSE_ROOT_ID] = S_IFDIR | 0755;
    fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fd);
    if (fd < 0 || mount("nothing", argv[1], "fuse.nothing", MS_NOSUID | MS_NODEV, options)) {
        perror("nothing: mount");
        return 1;
    }
    for (;;) {
        ssize_t size = read(fd, request, WRITE_BYTES + PAGE);
        if (size >= (ssize_t)sizeof(struct fuse_in_header))
            serve((void *)request, request + sizeof(struct fuse_in_header));
        else if (errno != EINTR && errno != EAGAIN && errno != ENOENT)
            return errno == ENODEV ? 0 : 1;
    }
}
