/* limit SOCKET WATTS SECONDS: lowers the first GPU's power limit for a while. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

static void *dealer;
static unsigned char out[1024], in[65536];
static size_t used;
static const unsigned char *end;
static uint64_t last_id;

static void fail(const char *what)
{
    fprintf(stderr, "limit: %s\n", what);
    exit(1);
}

/* Writing msgpack. */

static void put_map(unsigned pairs) { out[used++] = 0x80 | pairs; }
static void put_array(unsigned items) { out[used++] = 0x90 | items; }

static void put_str(const char *text)
{
    size_t length = strlen(text);
    if (length > 255 || used + length + 2 > sizeof out)
        fail("this name is too long");
    if (length < 32) {
        out[used++] = 0xa0 | length;
    } else {
        out[used++] = 0xd9;
        out[used++] = length;
    }
    memcpy(out + used, text, length);
    used += length;
}

static void put_uint(uint64_t value) /* the long form is always allowed */
{
    out[used++] = 0xcf;
    for (int shift = 56; shift >= 0; shift -= 8)
        out[used++] = value >> shift;
}

/* Reading msgpack. */

/* Reads the head of a value: its kind, and its number, length or count. Returns a pointer past it. */
static const unsigned char *head(const unsigned char *p, char *kind, uint64_t *n)
{
    static const struct { unsigned char first, last, bytes; char kind; } heads[] = {
        {0xc0, 0xc0, 0, 'n'}, {0xc2, 0xc3, 0, 'b'}, {0xca, 0xca, 4, 'f'}, {0xcb, 0xcb, 8, 'f'},
        {0xcc, 0xcc, 1, 'i'}, {0xcd, 0xcd, 2, 'i'}, {0xce, 0xce, 4, 'i'}, {0xcf, 0xcf, 8, 'i'},
        {0xd0, 0xd0, 1, 'i'}, {0xd1, 0xd1, 2, 'i'}, {0xd2, 0xd2, 4, 'i'}, {0xd3, 0xd3, 8, 'i'},
        {0xd9, 0xd9, 1, 's'}, {0xda, 0xda, 2, 's'}, {0xdb, 0xdb, 4, 's'},
        {0xdc, 0xdc, 2, 'a'}, {0xdd, 0xdd, 4, 'a'}, {0xde, 0xde, 2, 'm'}, {0xdf, 0xdf, 4, 'm'},
        {0x00, 0x7f, 0, 'i'}, {0xe0, 0xff, 0, 'i'},
        {0x80, 0x8f, 0, 'm'}, {0x90, 0x9f, 0, 'a'}, {0xa0, 0xbf, 0, 's'},
    };
    if (p >= end)
        fail("the reply is cut short");
    unsigned char c = *p++;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        if (c < heads[i].first || c > heads[i].last)
            continue;
        if (heads[i].bytes > end - p)
            fail("the reply is cut short");
        *kind = heads[i].kind;
        *n = c - heads[i].first; /* length or count, where the first byte holds it */
        if (heads[i].bytes) {
            *n = 0;
            for (int left = heads[i].bytes; left > 0; left--)
                *n = *n << 8 | *p++;
        }
        if (*kind == 's' && *n > (uint64_t)(end - p))
            fail("the reply is cut short");
        return p;
    }
    fail("the reply is no message");
    return NULL;
}

static const unsigned char *skip(const unsigned char *p)
{
    char kind;
    uint64_t n;
    p = head(p, &kind, &n);
    if (kind == 's')
        return p + n;
    if (kind == 'a' || kind == 'm')
        for (uint64_t left = kind == 'm' ? 2 * n : n; left > 0; left--)
            p = skip(p);
    return p;
}

/* Returns the value under a key of a map, or NULL. Skips other keys. */
static const unsigned char *find(const unsigned char *p, const char *key)
{
    char kind;
    uint64_t pairs, length;
    p = head(p, &kind, &pairs);
    for (; kind == 'm' && pairs > 0; pairs--) {
        char key_kind;
        const unsigned char *text = head(p, &key_kind, &length);
        if (key_kind == 's' && length == strlen(key) && !memcmp(text, key, length))
            return text + length;
        p = skip(skip(p));
    }
    return NULL;
}

static const unsigned char *at(const unsigned char *p, const char *key)
{
    p = find(p, key);
    if (!p)
        fail("the reply lacks what was asked for");
    return p;
}

static void copy_str(const unsigned char *p, char *to, size_t size)
{
    char kind;
    uint64_t length;
    p = head(p, &kind, &length);
    if (kind != 's' || length >= size)
        fail("the reply has no such text");
    memcpy(to, p, length);
    to[length] = 0;
}

static uint64_t uint_at(const unsigned char *p)
{
    char kind;
    uint64_t value;
    head(p, &kind, &value);
    return value;
}

static void fail_if_error(const unsigned char *p)
{
    char message[1024];
    const unsigned char *error = find(p, "error");
    if (error) {
        copy_str(at(error, "message"), message, sizeof message);
        fail(message);
    }
}

/* Requests. */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void begin(const char *op, unsigned arguments)
{
    used = 0;
    put_map(4 + arguments);
    put_str("v"), put_uint(1);
    put_str("id"), put_uint(++last_id);
    put_str("op"), put_str(op);
    put_str("deadline_ns"), put_uint(now_ns() + 5000000000ull);
}

/* Sends the request. Returns the result; on an error, the program ends. */
static const unsigned char *ask(void)
{
    if (zmq_send(dealer, out, used, 0) < 0)
        fail("no zeusd took the request within 5 s");
    for (;;) {
        int length = zmq_recv(dealer, in, sizeof in, 0);
        if (length < 0 || length > (int)sizeof in)
            fail("zeusd did not answer within 5 s");
        end = in + length;
        if (uint_at(at(in, "id")) != last_id)
            continue; /* of an earlier request, which was given up */
        fail_if_error(in);
        return at(in, "result");
    }
}

int main(int argc, char **argv)
{
    if (argc != 4)
        fail("usage: limit SOCKET WATTS SECONDS");
    char address[200], gpu[100], kind;
    uint64_t gpus;
    int wait_ms = 5000, one = 1, none = 0;
    dealer = zmq_socket(zmq_ctx_new(), ZMQ_DEALER);
    zmq_setsockopt(dealer, ZMQ_IMMEDIATE, &one, sizeof one);
    zmq_setsockopt(dealer, ZMQ_LINGER, &none, sizeof none);
    zmq_setsockopt(dealer, ZMQ_SNDTIMEO, &wait_ms, sizeof wait_ms);
    zmq_setsockopt(dealer, ZMQ_RCVTIMEO, &wait_ms, sizeof wait_ms);
    snprintf(address, sizeof address, "ipc://%s", argv[1]);
    if (zmq_connect(dealer, address))
        fail(zmq_strerror(zmq_errno()));

    begin("hello", 0);
    const unsigned char *node = ask();
    uint64_t beat_ns = uint_at(at(node, "lease_ttl_ms")) * 1000000 / 3;
    const unsigned char *first = head(at(node, "gpus"), &kind, &gpus);
    if (gpus == 0)
        fail("this node has no GPUs");
    copy_str(at(first, "uuid"), gpu, sizeof gpu);

    begin("set", 3);
    put_str("gpus"), put_array(1), put_str(gpu);
    put_str("control"), put_str("power_limit");
    put_str("value"), put_array(1), put_uint(strtoull(argv[2], NULL, 10) * 1000);
    fail_if_error(at(at(ask(), "gpus"), gpu));
    printf("%s is limited to %s W\n", gpu, argv[2]);
    fflush(stdout);

    for (uint64_t until = now_ns() + strtoull(argv[3], NULL, 10) * 1000000000; now_ns() < until;) {
        struct timespec pause = {beat_ns / 1000000000, beat_ns % 1000000000};
        nanosleep(&pause, NULL); /* here a program would work */
        begin("heartbeat", 0);
        char lost_kind;
        uint64_t lost;
        head(at(ask(), "lost"), &lost_kind, &lost);
        if (lost)
            fail("the lease was lost: the limit is no longer ours");
    }

    begin("release", 0);
    printf("%d released\n", (int)uint_at(at(ask(), "released")));
    return 0;
}
