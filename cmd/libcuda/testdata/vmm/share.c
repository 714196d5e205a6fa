// Memory that two processes share: the parent creates it and passes its descriptor over a
// socket, the child imports, maps, reads and writes it. The child is made before the driver is
// opened, since the driver does not survive a fork.

#include "driver.h"
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>

static void send_descriptor(int over, int fd) {
    char byte = 0, room[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec data = {&byte, 1};
    struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    if (sendmsg(over, &m, 0) != 1) die("sendmsg", "failed");
}

static int receive_descriptor(int over) {
    int fd;
    char byte, room[CMSG_SPACE(sizeof fd)];
    struct iovec data = {&byte, 1};
    struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    if (recvmsg(over, &m, 0) != 1 || !CMSG_FIRSTHDR(&m)) die("recvmsg", "no descriptor came");
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

static void wait_for_peer(int over) {
    char byte;
    if (read(over, &byte, 1) != 1) die("read", "the other process ended");
}

static void tell_peer(int over) {
    if (write(over, "", 1) != 1) die("write", "the other process ended");
}

static ptr map_memory(handle h, size_t n, unsigned flags) {
    ptr p;
    OK(cuMemAddressReserve(&p, n, 0, 0, 0));
    OK(cuMemMap(p, n, 0, h, 0));
    allow(p, n, flags);
    return p;
}

static void unmap_memory(ptr p, size_t n) {
    OK(cuCtxSynchronize());
    OK(cuMemUnmap(p, n));
    OK(cuMemAddressFree(p, n));
}

static void *number(int fd) { return (void *)(intptr_t)fd; }

static void child(int over) {
    handle h, again;
    properties props;
    int other;
    int fd = receive_descriptor(over);
    SHOW("child: import", cuMemImportFromShareableHandle(&h, number(fd), BY_DESCRIPTOR));
    SHOW("child: import again", cuMemImportFromShareableHandle(&again, number(fd), BY_DESCRIPTOR));
    close(fd);
    OK(cuMemRelease(again));
    OK(cuMemGetAllocationPropertiesFromHandle(&props, h));
    printf("child: location %u %d, handle types %u\n", props.at.type, props.at.id, props.handles);
    SHOW("child: export what was imported", cuMemExportToShareableHandle(&other, h, BY_DESCRIPTOR, 0));
    ptr p = map_memory(h, 4 * granule, READ_WRITE);
    printf("child: reads %#x and %#x\n", word_at(p), word_at(p + 4 * granule - 4));
    OK(cuMemsetD32_v2(p + granule, 0xc0ffee, granule / 4));
    OK(cuCtxSynchronize());
    tell_peer(over);
    wait_for_peer(over); // the parent has let go of the memory
    printf("child: still reads %#x\n", word_at(p));
    unmap_memory(p, 4 * granule);
    SHOW("child: release", cuMemRelease(h));
    fflush(stdout);
    tell_peer(over);
}

static void parent(int over) {
    properties shared = on_device;
    handle h, plain, nothing;
    int fd, second, null = open("/dev/null", O_RDONLY);
    shared.handles = BY_DESCRIPTOR;
    OK(cuMemCreate(&plain, granule, &on_device, 0));
    SHOW("parent: export memory without the handle type", cuMemExportToShareableHandle(&fd, plain, BY_DESCRIPTOR, 0));
    OK(cuMemRelease(plain));
    SHOW("parent: import of no memory", cuMemImportFromShareableHandle(&nothing, number(null), BY_DESCRIPTOR));
    OK(cuMemCreate(&h, 4 * granule, &shared, 0));
    ptr p = map_memory(h, 4 * granule, READ_WRITE);
    OK(cuMemsetD32_v2(p, 0xfeed, granule)); // all of the memory
    OK(cuCtxSynchronize());
    SHOW("parent: export", cuMemExportToShareableHandle(&fd, h, BY_DESCRIPTOR, 0));
    SHOW("parent: export again", cuMemExportToShareableHandle(&second, h, BY_DESCRIPTOR, 0));
    printf("parent: another descriptor, close-on-exec %d\n", fd != second && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    close(second);
    fflush(stdout);
    send_descriptor(over, fd);
    close(fd);
    wait_for_peer(over);
    printf("parent: reads %#x and %#x\n", word_at(p + granule), word_at(p + 2 * granule));
    unmap_memory(p, 4 * granule);
    SHOW("parent: release", cuMemRelease(h));
    fflush(stdout);
    tell_peer(over);
    wait_for_peer(over);
}

int main(int argc, char **argv) {
    int pair[2], status;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) != 0) die("socketpair", "failed");
    pid_t made = fork();
    if (made == 0) {
        close(pair[0]);
        load_driver(argc > 1 ? argv[1] : NULL);
        open_device();
        child(pair[1]);
        return 0;
    }
    close(pair[1]);
    load_driver(argc > 1 ? argv[1] : NULL);
    open_device();
    parent(pair[0]);
    if (waitpid(made, &status, 0) != made || status != 0) die("child", "failed");
    SHOW("release the context", cuDevicePrimaryCtxRelease_v2(device));
    return 0;
}
