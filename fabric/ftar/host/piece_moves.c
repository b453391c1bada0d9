/* Moves the bytes of pieces between TCP sockets and memory; sums and digests them while they are in the cache.
 *
 * Python decides which piece comes or goes, and reads and writes the headers (tcp_transport.py). An Inlet takes
 * the payload of a piece off its socket, block by block. It digests each block and adds this member's own
 * elements before the next block comes; then it digests the sums, which go to the next member. An Outlet sends a
 * piece, also one of which the end has not come yet. A member's own elements it digests block by block, each just
 * before the block is sent. So the digest stands behind the payload, and no byte is read from memory for its
 * digest alone.
 *
 * Elements of float32 may travel in a form of fewer bytes. An Inlet decodes them, sums in float32, and encodes the
 * sum; an Outlet encodes own elements just before they are sent.
 *
 * `fold` sums what lies in several members' memory on this host, by the same arithmetic.
 *
 * The sockets are non-blocking. A call moves what can move, without the interpreter's lock, and returns. A thread
 * that has nothing else to do names a descriptor at which it stops: then a call moves the whole piece. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

/* Bytes per call of the kernel: half of a usual second-level cache. */
#define BLOCK_BYTES (256 * 1024)
/* Bytes after which an inlet returns, so that they are sent on while they are in the cache. */
#define PUMP_BYTES (1024 * 1024)
/* Bytes that are digested and summed at once: with own elements and sums, a third of a first-level cache. */
#define INNER_BYTES 4096
/* A block is used up to a multiple of this: whole stripes of the digest, in whatever type the sums are. */
#define UNIT_BYTES 128
#define DIGEST_BYTES 16
#define MOST_HEADER_BYTES 2304 /* a header, and a note with its header in front */

/* ---- The digest ------------------------------------------------------------------------------------------------
 *
 * A payload is a row of stripes of eight words (64 bits, little-endian), the last one filled up with zeros. Word i
 * of a stripe is added to sum i. The word is also xored with a key of its lane and stripe, and the product of the
 * result's two halves is added to product i. The first half of the digest mixes the payload's length and the eight
 * sums, the second half the length and the products. The mixing can be reversed for each input.
 *
 * So a change within one aligned word changes its sum and the first half: every flipped bit is found, and every
 * burst within an aligned word. Other changes are missed only where the sums and the products both come out as
 * before. Flips in two words of a lane can cancel in the sum; the keys let them cancel in the product too in one
 * of 2**32 cases. Longer bursts and foreign bytes are missed in one of 2**64 cases or fewer. Words that change
 * places are found by the keys. The digest does not withstand an attacker. */

#define LANES 8
#define STRIPE_BYTES 64

typedef struct {
    uint64_t sum[LANES], product[LANES], stripes, bytes;
} Digest;

/* The first hexadecimal digits of pi, and 2**64 over the golden ratio. */
static const uint64_t LANE_KEY[LANES] = {
    0x243F6A8885A308D3u, 0x13198A2E03707344u, 0xA4093822299F31D0u, 0x082EFA98EC4E6C89u,
    0x452821E638D01377u, 0xBE5466CF34E90C6Cu, 0xC0AC29B7C97C50DDu, 0x3F84D5B5B5470917u};
static const uint64_t STRIPE_KEY = 0x9E3779B97F4A7C15u;

static inline uint64_t word_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* Digest whole stripes; bring the same number of bytes from `ahead` into the cache for what comes next. */
static void absorb_words(Digest *d, const uint8_t *at, size_t stripes, const uint8_t *ahead)
{
    for (; stripes; stripes--, at += STRIPE_BYTES, ahead += STRIPE_BYTES) {
        uint64_t key = d->stripes++ * STRIPE_KEY;
        __builtin_prefetch(ahead);
        for (int i = 0; i < LANES; i++) {
            uint64_t word = word_at(at + 8 * i), keyed = word ^ (LANE_KEY[i] + key);
            d->sum[i] += word;
            d->product[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        }
    }
}

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx2"))) static void absorb_avx2(Digest *d, const uint8_t *at, size_t stripes,
                                                        const uint8_t *ahead)
{
    const __m256i step = _mm256_set1_epi64x((long long)STRIPE_KEY);
    const __m256i first = _mm256_set1_epi64x((long long)(d->stripes * STRIPE_KEY));
    __m256i *sum = (__m256i *)d->sum, *product = (__m256i *)d->product;
    __m256i key0 = _mm256_add_epi64(_mm256_loadu_si256((const __m256i *)LANE_KEY), first);
    __m256i key1 = _mm256_add_epi64(_mm256_loadu_si256((const __m256i *)LANE_KEY + 1), first);
    __m256i sum0 = _mm256_loadu_si256(sum), sum1 = _mm256_loadu_si256(sum + 1);
    __m256i product0 = _mm256_loadu_si256(product), product1 = _mm256_loadu_si256(product + 1);
    d->stripes += stripes;
    for (; stripes; stripes--, at += STRIPE_BYTES, ahead += STRIPE_BYTES) {
        __m256i word0 = _mm256_loadu_si256((const __m256i *)at);
        __m256i word1 = _mm256_loadu_si256((const __m256i *)at + 1);
        __m256i keyed0 = _mm256_xor_si256(word0, key0), keyed1 = _mm256_xor_si256(word1, key1);
        _mm_prefetch((const char *)ahead, _MM_HINT_T0);
        sum0 = _mm256_add_epi64(sum0, word0);
        sum1 = _mm256_add_epi64(sum1, word1);
        product0 = _mm256_add_epi64(product0, _mm256_mul_epu32(keyed0, _mm256_srli_epi64(keyed0, 32)));
        product1 = _mm256_add_epi64(product1, _mm256_mul_epu32(keyed1, _mm256_srli_epi64(keyed1, 32)));
        key0 = _mm256_add_epi64(key0, step);
        key1 = _mm256_add_epi64(key1, step);
    }
    _mm256_storeu_si256(sum, sum0);
    _mm256_storeu_si256(sum + 1, sum1);
    _mm256_storeu_si256(product, product0);
    _mm256_storeu_si256(product + 1, product1);
}
#endif

typedef void Absorb(Digest *, const uint8_t *, size_t, const uint8_t *);
static Absorb *absorb_stripes = absorb_words;

/* Digest `size` bytes, a multiple of STRIPE_BYTES in all calls but the last. */
static void absorb(Digest *d, const uint8_t *at, size_t size, const uint8_t *ahead)
{
    size_t rest = size % STRIPE_BYTES;
    absorb_stripes(d, at, size / STRIPE_BYTES, ahead);
    if (rest) {
        uint8_t last[STRIPE_BYTES] = {0};
        memcpy(last, at + size - rest, rest);
        absorb_words(d, last, 1, last);
    }
    d->bytes += size;
}

static uint64_t mixed(uint64_t start, const uint64_t *words)
{
    for (int i = 0; i < LANES; i++) {
        start = (start ^ words[i]) * 0x9FB21C651E98DF25u;
        start ^= start >> 32;
    }
    return start;
}

static void end_digest(const Digest *d, uint8_t into[DIGEST_BYTES])
{
    uint64_t halves[2] = {mixed(d->bytes, d->sum), mixed(d->bytes * STRIPE_KEY, d->product)};
    for (int i = 0; i < DIGEST_BYTES; i++)
        into[i] = (uint8_t)(halves[i / 8] >> (i % 8 * 8));
}

/* ---- The arithmetic of reduce_ops.py --------------------------------------------------------------------------- */

/* The codes of ring_schedule.DTYPE_CODES and reduce_ops.OPERATION_CODES. */
enum { FLOAT32 = 1, FLOAT64, FLOAT16, BFLOAT16, INT32, INT64, TYPES };
/* A form of float32 on the wire, no type: see "Fewer bytes". */
enum { BLOCKS = TYPES };
enum { SUM, MEAN, MIN, MAX, OPERATIONS };
static const Py_ssize_t ITEM_BYTES[TYPES] = {0, 4, 8, 2, 2, 4, 8};

/* Elements may lie at any address, and memory of one type is read as another. */
typedef float f32 __attribute__((aligned(1), may_alias));
typedef double f64 __attribute__((aligned(1), may_alias));
typedef int32_t i32 __attribute__((aligned(1), may_alias));
typedef int64_t i64 __attribute__((aligned(1), may_alias));
typedef uint16_t u16 __attribute__((aligned(1), may_alias));

/* `into` may be `own`, or `received`, but no other overlap is possible. */
#define EACH(EXPRESSION)                                                                                               \
    do {                                                                                                               \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++)                                                        \
        {                                                                                                              \
            r = received[i], o = own[i];                                                                               \
            into[i] = (EXPRESSION);                                                                                    \
        }                                                                                                              \
    } while (0)

/* The result is NaN if either element is. `weight` is 0 unless a mean is to be finished. */
#define FOLD_FLOATS(NAME, TYPE, VALUE)                                                                                 \
    static void NAME(const TYPE *received, const TYPE *own, TYPE *into, size_t count, int operation, VALUE weight)     \
    {                                                                                                                  \
        VALUE r, o;                                                                                                    \
        if (operation == MIN)                                                                                          \
            EACH(r < o || r != r ? r : o);                                                                             \
        else if (operation == MAX)                                                                                     \
            EACH(r > o || r != r ? r : o);                                                                             \
        else if (weight != 0)                                                                                          \
            EACH((r + o) / weight);                                                                                    \
        else                                                                                                           \
            EACH(r + o);                                                                                               \
    }
FOLD_FLOATS(fold_f32, f32, float)
FOLD_FLOATS(fold_f64, f64, double)

#define FOLD_INTEGERS(NAME, TYPE, VALUE, UNSIGNED)                                                                     \
    static void NAME(const TYPE *received, const TYPE *own, TYPE *into, size_t count, int operation)                   \
    {                                                                                                                  \
        VALUE r, o;                                                                                                    \
        if (operation == MIN)                                                                                          \
            EACH(r < o ? r : o);                                                                                       \
        else if (operation == MAX)                                                                                     \
            EACH(r > o ? r : o);                                                                                       \
        else                                                                                                           \
            EACH((VALUE)((UNSIGNED)r + (UNSIGNED)o));                                                                  \
    }
FOLD_INTEGERS(fold_i32, i32, int32_t, uint32_t)
FOLD_INTEGERS(fold_i64, i64, int64_t, uint64_t)

static inline float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Return a float16 as float32. No step depends on whether this thread flushes small numbers to zero. */
static inline float widened(uint16_t half)
{
    uint32_t exponent = half & 0x7C00u, shifted = (uint32_t)(half & 0x7FFFu) << 13;
    uint32_t normal = shifted + (112u << 23), special = shifted + (224u << 23);
    uint32_t tiny = as_bits((float)(int32_t)(half & 0x3FFu) * 0x1p-24f);
    uint32_t bits = exponent == 0 ? tiny : exponent == 0x7C00u ? special : normal;
    return as_float(bits | (uint32_t)(half & 0x8000u) << 16);
}

/* Return a float32 rounded to float16, to nearest even. */
static inline uint16_t rounded(float value)
{
    uint32_t bits = as_bits(value), size = bits & 0x7FFFFFFFu;
    uint32_t normal = (size - (112u << 23) + 0xFFFu + (size >> 13 & 1)) >> 13;
    /* The addition rounds to a multiple of 2**-24, the distance of small float16 numbers. */
    uint32_t tiny = as_bits(as_float(size) + 0.5f) - (126u << 23);
    uint32_t special = size > 0x7F800000u ? 0x7E00u : 0x7C00u;
    uint32_t half = size >= 0x47800000u ? special : size < 0x38800000u ? tiny : normal;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

static inline uint16_t rounded_to_bfloat16(float value)
{
    uint32_t bits = as_bits(value);
    uint32_t normal = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : normal);
}

#define HALVES 512
/* Elements of several members' memory that are summed at once. */
#define FOLDED 1024

/* Return `count` elements of a type of 16 bits, or of float32, as float32: in `room`, or where they are. */
static const f32 *wide(const uint8_t *from, int type, f32 *room, size_t count)
{
    const u16 *halves = (const u16 *)from;
    if (type == FLOAT32)
        return (const f32 *)from;
    if (type == FLOAT16)
        for (size_t i = 0; i < count; i++)
            room[i] = widened(halves[i]);
    else
        for (size_t i = 0; i < count; i++)
            room[i] = as_float((uint32_t)halves[i] << 16);
    return room;
}

static void narrow(uint8_t *into, int type, const f32 *from, size_t count)
{
    u16 *halves = (u16 *)into;
    if (type == FLOAT32)
        memcpy(into, from, count * sizeof(float));
    else if (type == FLOAT16)
        for (size_t i = 0; i < count; i++)
            halves[i] = rounded(from[i]);
    else
        for (size_t i = 0; i < count; i++)
            halves[i] = rounded_to_bfloat16(from[i]);
}

/* The types of a sum: elements as they came, own elements, and elements as they are kept. */
typedef struct {
    int received, own, kept, operation;
    double weight; /* 0 unless a mean is to be finished */
} Sum;

static void fold(const Sum *sum, const uint8_t *received, const uint8_t *own, uint8_t *into, size_t count)
{
    int operation = sum->operation;
    float weight = (float)sum->weight;
    if (sum->own == FLOAT32)
        fold_f32((const f32 *)received, (const f32 *)own, (f32 *)into, count, operation, weight);
    else if (sum->own == FLOAT64)
        fold_f64((const f64 *)received, (const f64 *)own, (f64 *)into, count, operation, sum->weight);
    else if (sum->own == INT32)
        fold_i32((const i32 *)received, (const i32 *)own, (i32 *)into, count, operation);
    else if (sum->own == INT64)
        fold_i64((const i64 *)received, (const i64 *)own, (i64 *)into, count, operation);
    else
        while (count) {
            float one[HALVES], two[HALVES], total[HALVES];
            size_t some = count < HALVES ? count : HALVES;
            fold_f32(wide(received, sum->received, (f32 *)one, some), wide(own, sum->own, (f32 *)two, some),
                     (f32 *)total, some, operation, weight);
            narrow(into, sum->kept, (const f32 *)total, some);
            received += some * (size_t)ITEM_BYTES[sum->received];
            own += some * (size_t)ITEM_BYTES[sum->own];
            into += some * (size_t)ITEM_BYTES[sum->kept];
            count -= some;
        }
}

/* ---- Fewer bytes -----------------------------------------------------------------------------------------------
 *
 * A float32 element travels as BFLOAT16, rounded to nearest even, or in BLOCKS: blocks of 128 elements, from the
 * begin of the piece on, the last one shorter. A block is its scale (float32), then a byte q for each element. The
 * element is q times the scale, with q from -126 to 126; 127 is infinity, -127 minus infinity, -128 is NaN. The
 * scale is the largest finite size in the block divided by 126. So one huge element rounds small ones to zero.
 *
 * An element changes by at most half the scale (and 2**-15 of that). Three bounds make a form exact the second time:
 * what was decoded is encoded as the same numbers. The scale has 16 significant bits, so q times the scale is exact.
 * It is cut off and not rounded, so the largest element has q = 126, and no product overflows. It is at least
 * LEAST_SCALE, so nothing depends on whether this thread flushes small numbers to zero. */

#define BLOCK_ELEMENTS 128
#define SCALE_BYTES ((Py_ssize_t)sizeof(float))
/* Elements that are decoded, summed and encoded at once: whole blocks, and whole stripes of the digest in each form. */
#define CODED 2048
#define MOST_FORM_BYTES (CODED * 2)
#define LEVELS 126
#define LEAST_SCALE 0x1p-119f
#define INFINITE 0x7F800000u

static int is_form(int form)
{
    return form == BFLOAT16 || form == BLOCKS;
}

/* Return the bytes of `count` elements of a type or in a form. */
static Py_ssize_t bytes_of(int type, Py_ssize_t count)
{
    if (type == BLOCKS)
        return count + (count + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS * SCALE_BYTES;
    return count * ITEM_BYTES[type];
}

static Py_ssize_t count_of(int type, Py_ssize_t bytes)
{
    Py_ssize_t block = BLOCK_ELEMENTS + SCALE_BYTES;
    return type == BLOCKS ? bytes - (bytes + block - 1) / block * SCALE_BYTES : bytes / ITEM_BYTES[type];
}

static inline __attribute__((always_inline)) void encode_block(const f32 *from, uint8_t *into, size_t count)
{
    int8_t *codes = (int8_t *)into + SCALE_BYTES;
    int32_t most = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t size = (int32_t)(as_bits(from[i]) & 0x7FFFFFFFu), finite = size < (int32_t)INFINITE ? size : 0;
        most = finite > most ? finite : most;
    }
    float scale = as_float(as_bits(as_float((uint32_t)most) / LEVELS) & 0xFFFFFF00u);
    scale = scale > LEAST_SCALE ? scale : LEAST_SCALE;
    float inverse = 1 / scale;
    memcpy(into, &scale, sizeof scale);
    for (size_t i = 0; i < count; i++) {
        int32_t bits = (int32_t)as_bits(from[i]), size = bits & 0x7FFFFFFF;
        /* The addition rounds to a whole number, which then lies in the low bits. */
        int32_t code = (int32_t)as_bits(from[i] * inverse + 0x1.8p23f);
        int32_t special = size > (int32_t)INFINITE ? -128 : bits < 0 ? -127 : 127;
        codes[i] = (int8_t)(size < (int32_t)INFINITE ? code : special);
    }
}

static inline __attribute__((always_inline)) void decode_block(const uint8_t *from, f32 *into, size_t count)
{
    const int8_t *codes = (const int8_t *)from + SCALE_BYTES;
    float scale;
    memcpy(&scale, from, sizeof scale);
    for (size_t i = 0; i < count; i++) {
        int32_t code = codes[i];
        uint32_t special = code == -128 ? 0x7FC00000u : code < 0 ? INFINITE | 0x80000000u : INFINITE;
        uint32_t bits = as_bits((float)code * scale);
        into[i] = as_float(code > LEVELS || code < -LEVELS ? special : bits);
    }
}

/* All blocks of `count` elements; whole blocks have a constant length, which the compiler can unroll. */
#define EACH_BLOCK(BLOCK, FROM_STEP, INTO_STEP)                                                                        \
    do {                                                                                                               \
        for (; count >= BLOCK_ELEMENTS; count -= BLOCK_ELEMENTS, from += FROM_STEP, into += INTO_STEP)                 \
            BLOCK(from, into, BLOCK_ELEMENTS);                                                                         \
        if (count)                                                                                                     \
            BLOCK(from, into, count);                                                                                  \
    } while (0)
#define BLOCK_CODERS(NAME, TARGET)                                                                                     \
    TARGET static void encode_##NAME(const f32 *from, uint8_t *into, size_t count)                                     \
    {                                                                                                                  \
        EACH_BLOCK(encode_block, BLOCK_ELEMENTS, BLOCK_ELEMENTS + SCALE_BYTES);                                        \
    }                                                                                                                  \
    TARGET static void decode_##NAME(const uint8_t *from, f32 *into, size_t count)                                     \
    {                                                                                                                  \
        EACH_BLOCK(decode_block, BLOCK_ELEMENTS + SCALE_BYTES, BLOCK_ELEMENTS);                                        \
    }
BLOCK_CODERS(plain, )
#if defined(__x86_64__)
BLOCK_CODERS(avx2, __attribute__((target("avx2"))))
#endif
static void (*encode_blocks)(const f32 *, uint8_t *, size_t) = encode_plain;
static void (*decode_blocks)(const uint8_t *, f32 *, size_t) = decode_plain;

static void encode(int form, const f32 *from, uint8_t *into, size_t count)
{
    if (form == BLOCKS)
        encode_blocks(from, into, count);
    else
        narrow(into, form, from, count);
}

static void decode(int form, const uint8_t *from, f32 *into, size_t count)
{
    if (form == BLOCKS)
        decode_blocks(from, into, count);
    else
        wide(from, form, into, count);
}

/* ---- Waiting --------------------------------------------------------------------------------------------------- */

/* Note the time, for a thread that waits for progress. */
static void stamp(double *moved_s)
{
    struct timespec now;
    double seconds;
    clock_gettime(CLOCK_MONOTONIC, &now);
    seconds = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    __atomic_store(moved_s, &seconds, __ATOMIC_RELAXED);
}

static PyObject *stamped(const double *moved_s)
{
    double seconds;
    __atomic_load(moved_s, &seconds, __ATOMIC_RELAXED);
    return PyFloat_FromDouble(seconds);
}

/* Wait until bytes can move; false where `stop` is readable, or is -1: the caller does not want to wait. */
static int ready(int fd, short direction, int stop)
{
    struct pollfd both[2] = {{fd, direction, 0}, {stop, POLLIN, 0}};
    return stop >= 0 && (poll(both, 2, -1) < 0 || !both[1].revents);
}

static PyObject *refused(const char *why)
{
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

/* Hold the memory of `object`, or none for None, in place of what `buffer` held. */
static int hold(Py_buffer *buffer, PyObject *object, int flags)
{
    if (buffer->obj)
        PyBuffer_Release(buffer);
    buffer->obj = NULL;
    return object == Py_None ? 0 : PyObject_GetBuffer(object, buffer, flags);
}

/* ---- Own elements, where they lie ------------------------------------------------------------------------------ */

typedef struct {
    Py_buffer *parts;      /* one after the other */
    Py_ssize_t count, len; /* the number of parts, and their bytes */
    Py_ssize_t at, begin;  /* the part in use, and its first byte */
} Places;

/* Hold a tuple of memories, one memory, or none for None, in place of what `places` held. */
static int hold_places(Places *places, PyObject *object)
{
    int is_tuple = PyTuple_Check(object);
    Py_ssize_t count = is_tuple ? PyTuple_Size(object) : object != Py_None;
    while (places->count)
        hold(places->parts + --places->count, Py_None, 0);
    PyMem_Free(places->parts);
    *places = (Places){count ? PyMem_Calloc((size_t)count, sizeof(Py_buffer)) : NULL, 0, 0, 0, 0};
    if (count && !places->parts)
        return PyErr_NoMemory(), -1;
    for (; places->count < count; places->count++) {
        Py_buffer *part = places->parts + places->count;
        if (hold(part, is_tuple ? PyTuple_GetItem(object, places->count) : object, PyBUF_SIMPLE) < 0)
            return -1;
        places->len += part->len;
    }
    return 0;
}

/* Return `size` bytes from `offset` on: where they lie, or in `room` if they lie in several parts. Offsets grow. */
static const uint8_t *bytes_at(Places *places, Py_ssize_t offset, Py_ssize_t size, uint8_t *room)
{
    for (Py_ssize_t copied = 0, some; size; copied += some) {
        const Py_buffer *part = places->parts + places->at;
        Py_ssize_t into_it = offset + copied - places->begin;
        some = part->len - into_it < size - copied ? part->len - into_it : size - copied;
        if (some == size)
            return (const uint8_t *)part->buf + into_it;
        if (room + copied != (const uint8_t *)part->buf + into_it)
            memcpy(room + copied, (const uint8_t *)part->buf + into_it, (size_t)some);
        if (copied + some == size)
            break;
        places->begin += part->len, places->at++;
    }
    return room;
}

/* ---- Receiving ------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    int fd, element, operation;
    double weight;
    Places own;              /* a sum has `own` and `into`, a result only `into`, an old piece neither */
    Py_buffer scratch, into;
    Py_buffer onward;             /* the memory of a piece that goes on in its form */
    int staged, digested;         /* whether the payload comes into `scratch` */
    int form, last;               /* the form of the piece, 0 for none */
    Py_ssize_t size, arrived, used, trailer_arrived;
    Py_ssize_t ahead_wanted, ahead_arrived; /* bytes of the header behind this piece, which come with its digest */
    uint8_t trailer[DIGEST_BYTES], ahead[MOST_HEADER_BYTES];
    Digest arrived_digest, kept_digest;
    Sum sum;
    double moved_s;
} Inlet;

static size_t kept_bytes(const Inlet *in, Py_ssize_t bytes)
{
    if (in->form)
        return (size_t)bytes; /* of what goes on */
    return (size_t)(bytes / ITEM_BYTES[in->sum.received] * ITEM_BYTES[in->sum.kept]);
}

/* Use `size` bytes of a piece in a form. A sum is rounded where it goes on in that form, and the last one always: the
 * member that computed it takes what the others will decode. */
static void use_coded(Inlet *in, const uint8_t *at, Py_ssize_t size)
{
    float room[CODED], own_room[CODED];
    uint8_t unsent[MOST_FORM_BYTES];
    f32 *values = (f32 *)room;
    Py_ssize_t first = count_of(in->form, in->used);
    size_t count = (size_t)count_of(in->form, size);
    uint8_t *onward = in->onward.obj ? (uint8_t *)in->onward.buf + in->used : unsent;
    decode(in->form, at, values, count);
    if (in->own.count) {
        const uint8_t *own = bytes_at(&in->own, first * 4, (Py_ssize_t)count * 4, (uint8_t *)own_room);
        fold_f32(values, (const f32 *)own, values, count, in->operation, (float)in->sum.weight);
        if (in->last || in->onward.obj) {
            encode(in->form, values, onward, count);
            if (in->digested)
                absorb(&in->kept_digest, onward, (size_t)size, onward);
        }
        if (in->last)
            decode(in->form, onward, values, count);
    } else if (in->onward.obj)
        memcpy(onward, at, (size_t)size);
    if (in->into.obj)
        memcpy((f32 *)in->into.buf + first, room, count * sizeof(float));
}

/* Use the bytes that have come: all at the end of the piece, and units before. */
static void use(Inlet *in)
{
    Py_ssize_t fresh = in->arrived - in->used, item = ITEM_BYTES[in->sum.received];
    Py_ssize_t unit = in->form ? bytes_of(in->form, CODED) : UNIT_BYTES, inner = in->form ? unit : INNER_BYTES;
    const uint8_t *at = in->staged ? in->scratch.buf : (uint8_t *)in->into.buf + in->used;
    uint8_t room[INNER_BYTES];
    if (in->arrived < in->size)
        fresh -= fresh % unit;
    for (Py_ssize_t some; fresh; fresh -= some, at += some, in->used += some) {
        some = fresh < inner ? fresh : inner;
        Py_ssize_t bytes = ITEM_BYTES[in->element];
        const uint8_t *own = in->own.count && !in->form
                                 ? bytes_at(&in->own, in->used / item * bytes, some / item * bytes, room)
                                 : at;
        if (in->digested)
            absorb(&in->arrived_digest, at, (size_t)some, own);
        if (in->form)
            use_coded(in, at, some);
        if (in->form || !in->own.count)
            continue;
        uint8_t *into = (uint8_t *)in->into.buf + kept_bytes(in, in->used);
        fold(&in->sum, at, own, into, (size_t)(some / item));
        if (in->digested)
            absorb(&in->kept_digest, into, kept_bytes(in, some), into);
    }
    if (in->staged)
        memmove(in->scratch.buf, at, (size_t)(in->arrived - in->used));
}

static int complete(const Inlet *in)
{
    return in->arrived == in->size && (!in->digested || in->trailer_arrived == DIGEST_BYTES);
}

/* Receive once. Return the number of bytes, 0 at the end of the stream, -1 with errno. Bytes ahead do not count. */
static ssize_t receive(Inlet *in)
{
    Py_ssize_t begin = in->staged ? in->arrived - in->used : in->arrived;
    Py_ssize_t room = in->staged ? in->scratch.len - begin : BLOCK_BYTES;
    Py_ssize_t payload = in->size - in->arrived < room ? in->size - in->arrived : room;
    Py_ssize_t trailer = DIGEST_BYTES - in->trailer_arrived;
    struct iovec parts[3] = {{(uint8_t *)(in->staged ? in->scratch.buf : in->into.buf) + begin, (size_t)payload},
                             {in->trailer + in->trailer_arrived, (size_t)trailer},
                             {in->ahead, (size_t)in->ahead_wanted}};
    int with_trailer = in->digested && in->arrived + payload == in->size;
    ssize_t count = readv(in->fd, parts, with_trailer ? 3 : 1);
    if (count > 0) {
        Py_ssize_t came = count < payload ? count : payload;
        if (count > payload + trailer) {
            in->ahead_arrived = count - payload - trailer;
            count = payload + trailer;
        }
        in->arrived += came;
        in->trailer_arrived += count - came;
        use(in);
    }
    return count;
}

/* Return how many bytes have moved. Where none has, raise EOFError or the error of the call that failed. */
static PyObject *moved(Py_ssize_t bytes, ssize_t last, int why)
{
    if (bytes)
        return PyLong_FromSsize_t(bytes);
    errno = why;
    return last ? PyErr_SetFromErrno(PyExc_OSError) : (PyErr_SetNone(PyExc_EOFError), NULL);
}

static PyObject *inlet_pump(Inlet *in, PyObject *arguments)
{
    Py_ssize_t bytes = 0;
    ssize_t count = 1;
    int why = 0, stop = -1;
    if (!PyArg_ParseTuple(arguments, "|i", &stop))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    while (!complete(in) && (bytes < PUMP_BYTES || stop >= 0)) {
        count = receive(in);
        why = errno;
        if (count > 0)
            bytes += count, stamp(&in->moved_s);
        else if (!count || (why != EINTR && !(why == EAGAIN && ready(in->fd, POLLIN, stop))))
            break;
    }
    Py_END_ALLOW_THREADS
    return moved(bytes, count, why);
}

static int fits_coded(const Inlet *in, Py_ssize_t size, int form)
{
    Py_ssize_t count = is_form(form) ? count_of(form, size) : 0;
    return in->element == FLOAT32 && in->operation <= MEAN && in->scratch.len >= 2 * MOST_FORM_BYTES && count > 0 &&
           size == bytes_of(form, count) && (!in->own.count || in->own.len == count * SCALE_BYTES) &&
           (in->into.obj || in->onward.obj) && (!in->into.obj || in->into.len == count * SCALE_BYTES) &&
           (!in->onward.obj || in->onward.len == size);
}

static int fits(const Inlet *in, Py_ssize_t size, int received, int kept)
{
    int wide = in->element == FLOAT16 || in->element == BFLOAT16 ? FLOAT32 : in->element;
    if ((received != in->element && received != wide) || (kept != in->element && kept != wide))
        return 0;
    if (!in->own.count)
        return size > 0 && (!in->into.obj || in->into.len == size);
    Py_ssize_t count = size / ITEM_BYTES[received];
    return count > 0 && size == count * ITEM_BYTES[received] && in->own.len == count * ITEM_BYTES[in->element] &&
           in->into.obj && in->into.len == count * ITEM_BYTES[kept];
}

static PyObject *inlet_begin(Inlet *in, PyObject *arguments)
{
    PyObject *own, *into, *onward = Py_None;
    int received, kept, last, digested, form = 0;
    Py_ssize_t size, ahead = 0;
    if (!PyArg_ParseTuple(arguments, "nOOiipp|iOn", &size, &own, &into, &received, &kept, &last, &digested, &form,
                          &onward, &ahead) ||
        hold_places(&in->own, own) < 0 || hold(&in->into, into, PyBUF_WRITABLE) < 0 ||
        hold(&in->onward, onward, PyBUF_WRITABLE) < 0)
        return NULL;
    if ((form ? !fits_coded(in, size, form) : in->onward.obj || !fits(in, size, received, kept)) || ahead < 0 ||
        ahead > MOST_HEADER_BYTES)
        return refused("the memory does not fit the piece");
    in->size = size;
    in->form = form;
    in->last = last;
    in->staged = form || in->own.count || !in->into.obj;
    in->arrived = in->used = in->trailer_arrived = in->ahead_arrived = 0;
    in->ahead_wanted = ahead;
    in->digested = digested;
    memset(&in->arrived_digest, 0, sizeof(Digest));
    memset(&in->kept_digest, 0, sizeof(Digest));
    in->sum = (Sum){received, in->element, kept, in->operation, last && in->operation == MEAN ? in->weight : 0};
    Py_RETURN_NONE;
}

static PyObject *inlet_moved_s(Inlet *in, PyObject *Py_UNUSED(nothing))
{
    return stamped(&in->moved_s);
}

static PyObject *inlet_kept(Inlet *in, PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromSize_t(kept_bytes(in, in->used));
}

static PyObject *inlet_ahead(Inlet *in, PyObject *Py_UNUSED(nothing))
{
    return PyBytes_FromStringAndSize((const char *)in->ahead, in->ahead_arrived);
}

static PyObject *inlet_finish(Inlet *in, PyObject *Py_UNUSED(nothing))
{
    uint8_t digest[DIGEST_BYTES];
    int sums = in->own.count > 0;
    if (!complete(in))
        return refused("the piece has not come yet");
    hold_places(&in->own, Py_None);
    hold(&in->into, Py_None, 0);
    hold(&in->onward, Py_None, 0);
    if (!in->digested)
        return PyBytes_FromStringAndSize("", 0);
    end_digest(&in->arrived_digest, digest);
    if (memcmp(digest, in->trailer, DIGEST_BYTES))
        Py_RETURN_NONE;
    if (sums)
        end_digest(&in->kept_digest, digest);
    return PyBytes_FromStringAndSize((const char *)digest, DIGEST_BYTES);
}

static void *allocated(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static void freed(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *inlet_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *scratch;
    Inlet made = {0}, *in;
    if (!PyArg_ParseTuple(arguments, "iOiid", &made.fd, &scratch, &made.element, &made.operation, &made.weight))
        return NULL;
    if (made.element <= 0 || made.element >= TYPES || made.operation < 0 || made.operation >= OPERATIONS)
        return refused("the type or the operation is unknown");
    if (!(in = allocated(type)))
        return NULL;
    in->fd = made.fd, in->element = made.element, in->operation = made.operation, in->weight = made.weight;
    in->sum.received = in->sum.kept = made.element;
    if (hold(&in->scratch, scratch, PyBUF_WRITABLE) < 0 || in->scratch.len < 2 * UNIT_BYTES) {
        Py_DECREF(in);
        return PyErr_Occurred() ? NULL : refused("the scratch memory is too small");
    }
    return (PyObject *)in;
}

static void inlet_dealloc(Inlet *in)
{
    hold(&in->scratch, Py_None, 0);
    hold_places(&in->own, Py_None);
    hold(&in->into, Py_None, 0);
    hold(&in->onward, Py_None, 0);
    freed((PyObject *)in);
}

/* ---- Sending --------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    int fd, digested, computes; /* `computes`: the payload is digested here, before it is sent */
    int form;      /* the form in which `source` is written to the payload, before it is sent; 0: as it is */
    Places source; /* may have no part: then the payload is complete */
    Py_buffer payload;
    Py_ssize_t header_size, sent; /* `sent` counts header, payload and digest */
    Py_ssize_t ready, used;       /* the bytes of the payload that may go, and those that are digested */
    Py_ssize_t trailer_ready;
    uint8_t header[MOST_HEADER_BYTES], trailer[DIGEST_BYTES];
    Digest digest;
    double moved_s;
} Outlet;

static int may_send(const Outlet *out)
{
    return out->payload.obj && out->sent < out->header_size + out->ready + out->trailer_ready;
}

/* Write and digest the next block of the payload; `begin`: the bytes of it that are sent. */
static void prepare(Outlet *out, Py_ssize_t begin)
{
    Py_ssize_t size = out->payload.len, end = size;
    Py_ssize_t unit = out->form ? bytes_of(out->form, CODED) : STRIPE_BYTES;
    float room[CODED];
    if (begin + BLOCK_BYTES < size)
        end = (begin + BLOCK_BYTES) / unit * unit;
    for (Py_ssize_t some; out->used < end; out->used += some) {
        uint8_t *at = (uint8_t *)out->payload.buf + out->used;
        some = out->form && end - out->used > unit ? unit : end - out->used;
        Py_ssize_t count = out->form ? count_of(out->form, some) : 0;
        if (out->form) {
            const uint8_t *own = bytes_at(&out->source, count_of(out->form, out->used) * 4, count * 4, (uint8_t *)room);
            encode(out->form, (const f32 *)own, at, (size_t)count);
        } else if (out->source.count) {
            const uint8_t *own = bytes_at(&out->source, out->used, some, at);
            if (own != at)
                memcpy(at, own, (size_t)some);
        }
        if (out->computes)
            absorb(&out->digest, at, (size_t)some, at);
        if (out->computes && out->used + some == size)
            end_digest(&out->digest, out->trailer);
    }
}

/* Send once. Return the number of bytes, or -1 with errno. */
static ssize_t send_some(Outlet *out)
{
    Py_ssize_t header = out->sent < out->header_size ? out->header_size - out->sent : 0, size = out->payload.len;
    Py_ssize_t begin = header ? 0 : out->sent - out->header_size, end = out->ready, tail = 0;
    uint8_t *payload = out->payload.buf;
    if (begin > size)
        tail = begin - size, begin = size;
    if (out->computes || out->source.count) {
        prepare(out, begin);
        end = out->used;
    }
    struct iovec parts[3] = {
        {out->header + out->header_size - header, (size_t)header},
        {payload + begin, (size_t)(end - begin)},
        {out->trailer + tail, end == size && out->trailer_ready ? (size_t)(DIGEST_BYTES - tail) : 0}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    return sendmsg(out->fd, &message, MSG_NOSIGNAL);
}

static PyObject *outlet_pump(Outlet *out, PyObject *arguments)
{
    Py_ssize_t bytes = 0;
    ssize_t count = -1;
    int why = EAGAIN, stop = -1;
    if (!PyArg_ParseTuple(arguments, "|i", &stop))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    while (may_send(out)) {
        count = send_some(out);
        why = errno;
        if (count >= 0)
            bytes += count, out->sent += count, stamp(&out->moved_s);
        else if (why != EINTR && !(why == EAGAIN && ready(out->fd, POLLOUT, stop)))
            break;
    }
    Py_END_ALLOW_THREADS
    if (out->payload.obj && out->sent == out->header_size + out->payload.len + (out->digested ? DIGEST_BYTES : 0)) {
        hold(&out->payload, Py_None, 0);
        hold_places(&out->source, Py_None);
    }
    return moved(bytes, -1, why);
}

static PyObject *outlet_moved_s(Outlet *out, PyObject *Py_UNUSED(nothing))
{
    return stamped(&out->moved_s);
}

static PyObject *outlet_may_send(Outlet *out, PyObject *Py_UNUSED(nothing))
{
    return PyBool_FromLong(may_send(out));
}

static PyObject *outlet_allow(Outlet *out, PyObject *arguments)
{
    const char *digest = NULL;
    Py_ssize_t ready, digest_size = 0;
    if (!PyArg_ParseTuple(arguments, "n|z#", &ready, &digest, &digest_size))
        return NULL;
    if (!out->payload.obj || ready < out->ready || ready > out->payload.len || out->computes ||
        (digest && (ready < out->payload.len || digest_size != DIGEST_BYTES || !out->digested)))
        return refused("the bytes or the digest do not fit the piece");
    out->ready = ready;
    if (digest) {
        memcpy(out->trailer, digest, DIGEST_BYTES);
        out->trailer_ready = DIGEST_BYTES;
    }
    Py_RETURN_NONE;
}

static PyObject *outlet_begin(Outlet *out, PyObject *arguments)
{
    PyObject *payload, *source = Py_None;
    const char *header;
    Py_ssize_t header_size;
    int digested, computes, form = 0;
    if (!PyArg_ParseTuple(arguments, "y#Opp|iO", &header, &header_size, &payload, &digested, &computes, &form,
                          &source))
        return NULL;
    if (out->payload.obj || header_size > MOST_HEADER_BYTES)
        return refused("a piece is under way, or the header is too long");
    if (hold_places(&out->source, source) < 0 ||
        hold(&out->payload, payload, out->source.count ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    int fits = form ? is_form(form) && out->payload.len == bytes_of(form, out->source.len / SCALE_BYTES)
                    : !out->source.count || out->payload.len == out->source.len;
    if (!fits || (out->source.count ? !computes : form)) {
        hold(&out->payload, Py_None, 0);
        return refused("the elements do not fit the payload");
    }
    out->form = form;
    memcpy(out->header, header, (size_t)header_size);
    out->header_size = header_size;
    out->digested = digested;
    out->computes = digested && computes;
    out->sent = out->used = 0;
    out->ready = computes ? out->payload.len : 0;
    out->trailer_ready = out->computes ? DIGEST_BYTES : 0;
    memset(&out->digest, 0, sizeof(Digest));
    Py_RETURN_NONE;
}

static PyObject *outlet_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    int fd;
    if (!PyArg_ParseTuple(arguments, "i", &fd))
        return NULL;
    Outlet *out = allocated(type);
    if (out)
        out->fd = fd;
    return (PyObject *)out;
}

static void outlet_dealloc(Outlet *out)
{
    hold(&out->payload, Py_None, 0);
    hold_places(&out->source, Py_None);
    freed((PyObject *)out);
}

/* ---- The module ------------------------------------------------------------------------------------------------ */

static PyObject *digest_of(PyObject *Py_UNUSED(module), PyObject *payload)
{
    Py_buffer buffer;
    uint8_t digest[DIGEST_BYTES];
    Digest state = {0};
    if (PyObject_GetBuffer(payload, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    absorb(&state, buffer.buf, (size_t)buffer.len, buffer.buf);
    end_digest(&state, digest);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return PyBytes_FromStringAndSize((const char *)digest, DIGEST_BYTES);
}

static PyObject *coded_bytes(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    int form;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(arguments, "in", &form, &count))
        return NULL;
    return is_form(form) ? PyLong_FromSsize_t(bytes_of(form, count)) : refused("no such form");
}

#define MOST_PARTS 16

static PyObject *fold_parts(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *tuple, *own, *into;
    int element, first, kept, operation, last, ok, form = 0;
    double weight;
    Py_buffer held[MOST_PARTS + 2] = {{0}};
    if (!PyArg_ParseTuple(arguments, "O!OOiiiidp|i", &PyTuple_Type, &tuple, &own, &into, &element, &first, &kept,
                          &operation, &weight, &last, &form))
        return NULL;
    Py_ssize_t parts = PyTuple_Size(tuple), size = 0, count;
    int wide = element == FLOAT16 || element == BFLOAT16 ? FLOAT32 : element;
    if (parts < 1 || parts > MOST_PARTS || element <= 0 || element >= TYPES || operation < 0 ||
        operation >= OPERATIONS || (first != element && first != wide) || (kept != element && kept != wide) ||
        (form && (element != FLOAT32 || !is_form(form))))
        return refused("the number of parts, a type or the operation is unknown");
    ok = hold(held + parts, own, PyBUF_SIMPLE) == 0 && hold(held + parts + 1, into, PyBUF_WRITABLE) == 0;
    count = ok ? held[parts].len / ITEM_BYTES[element] : 0;
    for (Py_ssize_t i = 0; ok && i < parts; i++) {
        ok = hold(held + i, PyTuple_GetItem(tuple, i), PyBUF_SIMPLE) == 0;
        size += ok && held[i].len == count * ITEM_BYTES[i ? element : first];
    }
    if (ok && (size < parts || held[parts + 1].len != count * ITEM_BYTES[kept])) {
        ok = 0;
        refused("the memory of the parts does not fit");
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t low = 0, some; ok && low < count; low += some) {
        uint8_t room[FOLDED * sizeof(double)];
        const uint8_t *total = (uint8_t *)held[0].buf + low * ITEM_BYTES[first];
        Sum sum = {first, element, wide, operation, 0};
        some = count - low < FOLDED ? count - low : FOLDED;
        for (Py_ssize_t i = 1; i < parts; i++, total = room, sum.received = wide)
            fold(&sum, total, (uint8_t *)held[i].buf + low * ITEM_BYTES[element], room, (size_t)some);
        sum.kept = kept;
        sum.weight = last && operation == MEAN ? weight : 0;
        fold(&sum, total, (uint8_t *)held[parts].buf + low * ITEM_BYTES[element],
             (uint8_t *)held[parts + 1].buf + low * ITEM_BYTES[kept], (size_t)some);
        if (form) { /* the blocks begin with the piece, and FOLDED is a number of whole blocks */
            encode(form, (const f32 *)held[parts + 1].buf + low, room, (size_t)some);
            decode(form, room, (f32 *)held[parts + 1].buf + low, (size_t)some);
        }
    }
    Py_END_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < parts + 2; i++)
        hold(held + i, Py_None, 0);
    return ok ? Py_NewRef(Py_None) : NULL;
}

#define METHOD(NAME, FUNCTION, KIND) {NAME, (PyCFunction)(void (*)(void))FUNCTION, KIND, "See piece_moves.pyi."}

static PyMethodDef inlet_methods[] = {
    METHOD("begin", inlet_begin, METH_VARARGS), METHOD("pump", inlet_pump, METH_VARARGS),
    METHOD("kept", inlet_kept, METH_NOARGS), METHOD("finish", inlet_finish, METH_NOARGS),
    METHOD("ahead", inlet_ahead, METH_NOARGS), METHOD("moved_s", inlet_moved_s, METH_NOARGS), {0}};
static PyType_Slot inlet_slots[] = {
    {Py_tp_new, inlet_new}, {Py_tp_dealloc, inlet_dealloc}, {Py_tp_methods, inlet_methods}, {0, NULL}};
static PyType_Spec inlet_spec = {
    "fabric.ftar.host.piece_moves.Inlet", sizeof(Inlet), 0, Py_TPFLAGS_DEFAULT, inlet_slots};

static PyMethodDef outlet_methods[] = {
    METHOD("begin", outlet_begin, METH_VARARGS), METHOD("allow", outlet_allow, METH_VARARGS),
    METHOD("pump", outlet_pump, METH_VARARGS), METHOD("may_send", outlet_may_send, METH_NOARGS),
    METHOD("moved_s", outlet_moved_s, METH_NOARGS), {0}};
static PyType_Slot outlet_slots[] = {
    {Py_tp_new, outlet_new}, {Py_tp_dealloc, outlet_dealloc}, {Py_tp_methods, outlet_methods}, {0, NULL}};
static PyType_Spec outlet_spec = {
    "fabric.ftar.host.piece_moves.Outlet", sizeof(Outlet), 0, Py_TPFLAGS_DEFAULT, outlet_slots};

static PyMethodDef functions[] = {
    METHOD("digest", digest_of, METH_O), METHOD("fold", fold_parts, METH_VARARGS),
    METHOD("coded_bytes", coded_bytes, METH_VARARGS), {0}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "piece_moves", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_piece_moves(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        absorb_stripes = absorb_avx2;
        encode_blocks = encode_avx2;
        decode_blocks = decode_avx2;
    }
#endif
    PyObject *module = PyModule_Create(&definition);
    PyObject *inlet = PyType_FromSpec(&inlet_spec), *outlet = PyType_FromSpec(&outlet_spec);
    if (!module || !inlet || !outlet || PyModule_AddObjectRef(module, "Inlet", inlet) < 0 ||
        PyModule_AddObjectRef(module, "Outlet", outlet) < 0 ||
        PyModule_AddIntConstant(module, "BLOCK_BYTES", BLOCK_BYTES) < 0 ||
        PyModule_AddIntConstant(module, "DIGEST_BYTES", DIGEST_BYTES) < 0)
        Py_CLEAR(module);
    Py_XDECREF(inlet);
    Py_XDECREF(outlet);
    return module;
}
