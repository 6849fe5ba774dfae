// What loops translated from Python stand on: arrays, their slices, and Python's arithmetic.
//
// Arrays are rows of numbers whose last dimension lies side by side; columns are strided. Counts of
// references are plain numbers: a loop runs while Python's lock is held. No operation is fused with
// another and none is reordered, so that every processor gives the same bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>

using I = int64_t;

namespace rt {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// Arrays

struct Block {
    I refs;
    I pad;
};

template <class T, int N>
struct A {
    T* p = nullptr;
    I n[N] = {};
    I s[N] = {};  // steps of each dimension, in elements; the last is 1
    Block* own = nullptr;

    A() = default;
    A(const A& o) { take(o); }
    A& operator=(const A& o) {
        if (this != &o) {
            if (o.own) o.own->refs++;
            drop();
            copy(o);
        }
        return *this;
    }
    ~A() { drop(); }
    I size() const {
        I total = 1;
        for (int d = 0; d < N; d++) total *= n[d];
        return total;
    }
    void take(const A& o) {
        copy(o);
        if (own) own->refs++;
    }
    void copy(const A& o) {
        p = o.p;
        own = o.own;
        for (int d = 0; d < N; d++) n[d] = o.n[d], s[d] = o.s[d];
    }
    void drop() {
        if (own && --own->refs == 0) std::free(own);
    }
};

template <class T>
struct Column {  // one place of each row
    T* p;
    I n, s;
};

struct All {};
struct Slice {
    I low, high;
    bool to_end;
};
inline Slice slice(I low, I high) { return {low, high, false}; }
inline Slice from(I low) { return {low, 0, true}; }

template <class T>
struct is_array : std::false_type {};
template <class T, int N>
struct is_array<A<T, N>> : std::true_type {};
template <class T>
struct is_column : std::false_type {};
template <class T>
struct is_column<Column<T>> : std::true_type {};
template <class T>
constexpr bool is_number = std::is_arithmetic_v<std::decay_t<T>>;

template <class T, int N>
A<T, N> made(const I (&n)[N]) {
    A<T, N> a;
    I step = 1;
    for (int d = N - 1; d >= 0; d--) a.n[d] = n[d], a.s[d] = step, step *= n[d];
    a.own = static_cast<Block*>(std::malloc(sizeof(Block) + (step > 0 ? step : 1) * sizeof(T)));
    if (!a.own) throw std::bad_alloc();
    a.own->refs = 1;
    a.p = reinterpret_cast<T*>(a.own + 1);
    return a;
}
template <class T, class... N>
A<T, sizeof...(N)> empty(N... n) {
    I shape[] = {I(n)...};
    return made<T, sizeof...(N)>(shape);
}
template <class T, class V, class... N>
A<T, sizeof...(N)> full(V value, N... n) {
    auto a = empty<T>(n...);
    std::fill(a.p, a.p + a.size(), T(value));
    return a;
}
template <class T, class... N>
A<T, sizeof...(N)> zeros(N... n) {
    auto a = empty<T>(n...);
    std::memset(static_cast<void*>(a.p), 0, a.size() * sizeof(T));
    return a;
}
template <class T, class... V>
A<T, 1> array(V... values) {
    auto a = empty<T>(sizeof...(V));
    I at = 0;
    ((a.p[at++] = T(values)), ...);
    return a;
}
inline A<I, 1> arange(I n) {
    auto a = empty<I>(n);
    for (I i = 0; i < n; i++) a.p[i] = i;
    return a;
}

template <class T, int N>
I len(const A<T, N>& a) {
    return a.n[0];
}
template <class T>
I len(const Column<T>& a) {
    return a.n;
}

// Numbers as they are held in variables: whole numbers have 64 bits.

template <class T>
auto val(const T& x) {
    if constexpr (std::is_same_v<T, bool>)
        return x;
    else if constexpr (std::is_integral_v<T>)
        return I(x);
    else
        return x;
}

// Arguments: numbers as variables hold them, all else as it is.

template <class T>
decltype(auto) arg(const T& x) {
    if constexpr (std::is_arithmetic_v<T>)
        return val(x);
    else
        return (x);
}

// Places and slices

#ifdef CHECKED
#include <cstdio>
inline void check(I i, I n) {
    if (i < 0 || i >= n) {
        std::fprintf(stderr, "index %lld of %lld\n", (long long)i, (long long)n);
        std::abort();
    }
}
#else
inline void check(I, I) {}
#endif

template <class T>
T& at(const A<T, 1>& a, I i) {
    check(i, a.n[0]);
    return a.p[i];
}
template <class T>
T& at(const A<T, 2>& a, I i, I j) {
    check(i, a.n[0]), check(j, a.n[1]);
    return a.p[i * a.s[0] + j];
}
template <class T>
T& at(const A<T, 3>& a, I i, I j, I k) {
    check(i, a.n[0]), check(j, a.n[1]), check(k, a.n[2]);
    return a.p[i * a.s[0] + j * a.s[1] + k];
}
template <class T>
T& at(const A<T, 4>& a, I i, I j, I k, I l) {
    check(i, a.n[0]), check(j, a.n[1]), check(k, a.n[2]), check(l, a.n[3]);
    return a.p[i * a.s[0] + j * a.s[1] + k * a.s[2] + l];
}
template <class T>
T& at(const Column<T>& a, I i) {
    return a.p[i * a.s];
}
template <class T, int N>
A<T, N - 1> part(const A<T, N>& a, I i) {
    check(i, a.n[0]);
    A<T, N - 1> b;
    b.p = a.p + i * a.s[0];
    for (int d = 1; d < N; d++) b.n[d - 1] = a.n[d], b.s[d - 1] = a.s[d];
    b.own = a.own;
    if (b.own) b.own->refs++;
    return b;
}
template <class T, int N, class = std::enable_if_t<(N > 1)>>
A<T, N - 1> at(const A<T, N>& a, I i) {
    return part(a, i);
}
template <class T>
A<T, 1> at(const A<T, 3>& a, I i, I j) {
    return part(part(a, i), j);
}
template <class T>
A<T, 2> at(const A<T, 4>& a, I i, I j) {
    return part(part(a, i), j);
}
template <class T, int N>
A<T, N> at(const A<T, N>& a, All) {
    return a;
}
template <class T, int N>
A<T, N> at(const A<T, N>& a, Slice s) {
    I high = s.to_end ? a.n[0] : s.high < 0 ? s.high + a.n[0] : std::min(s.high, a.n[0]);
    A<T, N> b = a;
    b.p = a.p + s.low * a.s[0];
    b.n[0] = std::max<I>(high - s.low, 0);
    return b;
}
template <class T>
A<T, 1> at(const A<T, 2>& a, I i, All) {
    return part(a, i);
}
template <class T>
A<T, 1> at(const A<T, 2>& a, I i, Slice s) {
    return at(part(a, i), s);
}
template <class T>
A<T, 1> at(const A<T, 3>& a, I i, I j, Slice s) {
    return at(part(part(a, i), j), s);
}
template <class T>
Column<T> at(const A<T, 2>& a, All, I j) {
    return {a.p + j, a.n[0], a.s[0]};
}
template <class T>
Column<T> at(const A<T, 2>& a, Slice s, I j) {
    return at(at(a, s), All(), j);
}
template <class T, int N>  // places by a row of numbers
A<T, N> at(const A<T, N>& a, const A<I, 1>& which) {
    I n[N];
    n[0] = which.n[0];
    I wide = 1;
    for (int d = 1; d < N; d++) n[d] = a.n[d], wide *= a.n[d];
    auto b = made<T, N>(n);
    for (I i = 0; i < n[0]; i++) std::copy_n(a.p + which.p[i] * a.s[0], wide, b.p + i * wide);
    return b;
}

// Reading a place: numbers come as `val` holds them.

template <class X, class... K>
auto ld(const X& a, const K&... k) {
    using R = decltype(at(a, k...));
    if constexpr (std::is_lvalue_reference_v<R>)
        return val(static_cast<const std::decay_t<R>&>(at(a, k...)));
    else
        return at(a, k...);
}

// Filling a slice

template <class T, class V>
void fill(const A<T, 1>& a, const V& v) {
    if constexpr (is_number<V>)
        for (I i = 0; i < a.n[0]; i++) a.p[i] = T(v);
    else if constexpr (is_column<V>::value)
        for (I i = 0; i < a.n[0]; i++) a.p[i] = T(v.p[i * v.s]);
    else
        for (I i = 0; i < a.n[0]; i++) a.p[i] = T(v.p[i]);
}
template <class T, class V>
void fill(const A<T, 2>& a, const V& v) {
    for (I i = 0; i < a.n[0]; i++) {
        if constexpr (is_number<V>)
            fill(part(a, i), v);
        else
            fill(part(a, i), part(v, i));
    }
}
template <class T, class V>
void fill(const Column<T>& a, const V& v) {
    for (I i = 0; i < a.n; i++) {
        if constexpr (is_number<V>)
            a.p[i * a.s] = T(v);
        else if constexpr (is_column<V>::value)
            a.p[i * a.s] = T(v.p[i * v.s]);
        else
            a.p[i * a.s] = T(v.p[i]);
    }
}
template <class T, class... V>
void fill(const A<T, 1>& a, const std::tuple<V...>& v) {
    std::apply([&](const auto&... one) { I at = 0; ((a.p[at++] = T(one)), ...); }, v);
}
template <class X, class V>
void set(X&& place, const V& v) {
    if constexpr (std::is_lvalue_reference_v<X> && is_number<X>)
        place = std::decay_t<X>(v);
    else
        fill(place, v);
}
template <class T, class V>
void put(const A<T, 1>& a, const A<I, 1>& which, const V& v) {
    for (I i = 0; i < which.n[0]; i++) a.p[which.p[i]] = T(v.p[i]);
}

// Whole arrays

template <class L, class R, class F>
auto each(const L& l, const R& r, F f) {
    auto left = [&](I i) {
        if constexpr (is_number<L>) return l;
        else if constexpr (is_column<L>::value) return val(l.p[i * l.s]);
        else return val(l.p[i]);
    };
    auto right = [&](I i) {
        if constexpr (is_number<R>) return r;
        else if constexpr (is_column<R>::value) return val(r.p[i * r.s]);
        else return val(r.p[i]);
    };
    I n;
    if constexpr (is_number<L>) n = len(r);
    else n = len(l);
    using T = std::decay_t<decltype(f(left(0), right(0)))>;
    auto out = empty<T>(n);
    for (I i = 0; i < n; i++) out.p[i] = f(left(i), right(i));
    return out;
}
template <class L, class R>
constexpr bool whole = is_array<L>::value || is_array<R>::value || is_column<L>::value ||
                       is_column<R>::value;
#define EACH(NAME, OP)                                                       \
    template <class L, class R>                                              \
    auto NAME(const L& l, const R& r) {                                      \
        if constexpr (whole<L, R>)                                           \
            return each(l, r, [](auto a, auto b) { return a OP b; });        \
        else                                                                 \
            return l OP r;                                                   \
    }
EACH(add, +) EACH(sub, -) EACH(mul, *) EACH(eq, ==) EACH(ne, !=) EACH(lt, <) EACH(le, <=)
EACH(gt, >) EACH(ge, >=)
#undef EACH

template <class L, class R>
auto over1(L l, R r) {  // Python's division: of whole numbers too
    if constexpr (std::is_same_v<L, float> && std::is_same_v<R, float>)
        return l / r;
    else
        return double(l) / double(r);
}
template <class L, class R>
auto over(const L& l, const R& r) {
    if constexpr (whole<L, R>)
        return each(l, r, [](auto a, auto b) { return over1(a, b); });
    else
        return over1(l, r);
}
template <class X>
auto neg(const X& x) {
    if constexpr (is_array<X>::value || is_column<X>::value)
        return each(x, I(0), [](auto a, auto) { return -a; });
    else
        return -x;
}

template <class X, class V, class F>
void change(const X& a, const V& v, F f) {
    for (I i = 0; i < len(a); i++) {
        auto& one = at(a, i);
        if constexpr (is_number<V>)
            one = f(one, v);
        else
            one = f(one, at(v, i));
    }
}
#define CHANGE(NAME, OP)                                                              \
    template <class X, class V>                                                       \
    void NAME(X&& place, const V& v) {                                                \
        using P = std::decay_t<X>;                                                    \
        if constexpr (is_number<X>)                                                   \
            place = P(place OP v);                                                    \
        else                                                                          \
            change(place, v, [](auto a, auto b) { return decltype(a)(a OP b); });     \
    }
CHANGE(add_to, +) CHANGE(sub_to, -) CHANGE(mul_to, *) CHANGE(or_to, |) CHANGE(and_to, &)
CHANGE(right_to, >>)
#undef CHANGE
template <class X, class V>
void over_to(X& place, const V& v) {
    place = X(over1(place, v));
}

template <class X>
bool any(const X& a) {
    for (I i = 0; i < len(a); i++)
        if (at(a, i)) return true;
    return false;
}
template <class X>
auto sum(const X& a) {
    using T = decltype(val(at(a, 0)));
    std::conditional_t<std::is_same_v<T, bool>, I, T> total = 0;
    for (I i = 0; i < len(a); i++) total += at(a, i);
    return total;
}
template <class T>
auto sum_down(const A<T, 2>& a) {
    auto out = zeros<std::conditional_t<std::is_floating_point_v<T>, T, I>>(a.n[1]);
    for (I i = 0; i < a.n[0]; i++)
        for (I j = 0; j < a.n[1]; j++) out.p[j] += at(a, i, j);
    return out;
}
template <class X>
auto max_of(const X& a) {
    auto best = val(at(a, 0));
    for (I i = 1; i < len(a); i++)
        if (at(a, i) > best) best = val(at(a, i));
    return best;
}
template <class T, int N>
A<T, N> copy(const A<T, N>& a) {
    auto b = made<T, N>(a.n);
    if constexpr (N == 1)
        std::copy_n(a.p, a.n[0], b.p);
    else
        for (I i = 0; i < a.n[0]; i++) fill(part(b, i), part(a, i));
    return b;
}
template <class T>
A<T, 1> reversed(const A<T, 1>& a) {
    auto b = empty<T>(a.n[0]);
    for (I i = 0; i < a.n[0]; i++) b.p[i] = a.p[a.n[0] - 1 - i];
    return b;
}
template <class T>
void sort(const A<T, 1>& a) {
    std::sort(a.p, a.p + a.n[0]);
}
template <class D, class T>
A<D, 1> as(const A<T, 1>& a) {
    auto b = empty<D>(a.n[0]);
    for (I i = 0; i < a.n[0]; i++) b.p[i] = D(a.p[i]);
    return b;
}
template <class D, class T>
A<D, 2> as(const A<T, 2>& a) {
    auto b = empty<D>(a.n[0], a.n[1]);
    for (I i = 0; i < a.n[0]; i++)
        for (I j = 0; j < a.n[1]; j++) at(b, i, j) = D(at(a, i, j));
    return b;
}
template <class T>
A<T, 1> matmul(const A<T, 2>& a, const A<T, 1>& b) {
    auto out = zeros<T>(a.n[0]);
    for (I i = 0; i < a.n[0]; i++)
        for (I j = 0; j < a.n[1]; j++) out.p[i] += at(a, i, j) * b.p[j];
    return out;
}
template <class X>
A<I, 1> flatnonzero(const X& a) {
    I many = 0;
    for (I i = 0; i < len(a); i++) many += bool(at(a, i));
    auto out = empty<I>(many);
    many = 0;
    for (I i = 0; i < len(a); i++)
        if (at(a, i)) out.p[many++] = i;
    return out;
}
template <class X>
A<I, 1> argsort(const X& a) {
    auto out = arange(len(a));
    std::stable_sort(out.p, out.p + out.n[0], [&](I i, I j) { return at(a, i) < at(a, j); });
    return out;
}
template <class T, int N>
I argmax(const A<T, N>& a) {
    I best = 0, size = a.size();  // of arrays that are whole
    for (I i = 1; i < size; i++)
        if (a.p[i] > a.p[best]) best = i;
    return best;
}
template <class T, class V>
I searchsorted(const A<T, 1>& a, const V& v) {
    return std::lower_bound(a.p, a.p + a.n[0], v) - a.p;
}

// Tuples and named tuples

template <int K, class... T>
const auto& get(const std::tuple<T...>& t) {
    return std::get<K>(t);
}
template <int K, class T, int N, class = std::enable_if_t<(N > 1)>>
A<T, N - 1> get(const A<T, N>& a) {
    return part(a, K);
}
template <int K, class S>
const auto& get(const S& s, decltype(&S::named) = nullptr) {
    return s.template get<K>();
}

// Python's arithmetic

template <class L, class R>
auto floordiv(L l, R r) {
    if constexpr (std::is_integral_v<L> && std::is_integral_v<R>) {
        I a = l, b = r, q = a / b;
        return (a % b != 0 && (a < 0) != (b < 0)) ? q - 1 : q;
    } else {
        double a = l, b = r, m = std::fmod(a, b), d = (a - m) / b;
        if (m != 0 && (b < 0) != (m < 0)) d -= 1.0;
        double f = std::floor(d);
        return d - f > 0.5 ? f + 1.0 : f;
    }
}
template <class L, class R>
auto mod(L l, R r) {
    if constexpr (std::is_integral_v<L> && std::is_integral_v<R>) {
        I a = l, b = r, m = a % b;
        return (m != 0 && (m < 0) != (b < 0)) ? m + b : m;
    } else {
        double a = l, b = r, m = std::fmod(a, b);
        return (m != 0 && (m < 0) != (b < 0)) ? m + b : m;
    }
}
template <class L, class R>
auto max(const L& l, const R& r) {
    using C = std::common_type_t<L, R>;
    return C(r) > C(l) ? C(r) : C(l);
}
template <class L, class R>
auto min(const L& l, const R& r) {
    using C = std::common_type_t<L, R>;
    return C(r) < C(l) ? C(r) : C(l);
}
template <class L, class R, class... M>
auto max(const L& l, const R& r, const M&... more) {
    return max(max(l, r), more...);
}
template <class L, class R, class... M>
auto min(const L& l, const R& r, const M&... more) {
    return min(min(l, r), more...);
}

// The functions of `foretell.portable`, place by place.

inline double series(const double* terms, int many, double x) {
    double found = terms[0];
    for (int k = 1; k < many; k++) found = found * x + terms[k];
    return found;
}
inline double exp(double x) {
    static const double terms[] = {
        1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
        1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0,
        1.0, 1.0};
    if (x != x) return x;
    double kept = x < -746.0 ? -746.0 : x > 711.0 ? 711.0 : x;
    double times = std::rint(kept * 1.4426950408889634);
    double rest = (kept - times * 0.6931471803691238) - times * 1.9082149292705877e-10;
    return std::ldexp(series(terms, 14, rest), int(times));
}
inline double parted(double x, int& times) {
    static const double terms[] = {
        1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7,
        1.0 / 5, 1.0 / 3, 1.0};
    double near = std::frexp(x, &times);
    if (near < 0.7071067811865476) near = 2.0 * near, times -= 1;
    double slope = (near - 1.0) / (near + 1.0);
    return 2.0 * slope * series(terms, 12, slope * slope);
}
inline double log(double x) {
    if (!(x > 0 && x < inf)) return x == 0 ? -inf : x == inf ? inf : nan;
    int times;
    double part = parted(x, times);
    return times * 0.6931471803691238 + (part + times * 1.9082149292705877e-10);
}
inline double log2(double x) {
    if (!(x > 0 && x < inf)) return x == 0 ? -inf : x == inf ? inf : nan;
    int times;
    double part = parted(x, times);
    return times + part * 1.4426950408889634;
}
inline double power(double x, double to) {
    if (to == 1.0) return x;
    if (to == 2.0) return x * x;
    if (x == 2.0 && to == std::rint(to)) return std::ldexp(1.0, int(to));
    return x > 0 ? exp(to * log(x)) : to > 0 ? 0.0 : inf;
}

// Numbers at random: the Mersenne Twister, as NumPy's legacy generator draws them.

struct Random {
    uint32_t state[624];
    int at = 624;
    void seed(uint32_t s) {
        for (int i = 0; i < 624; i++) {
            state[i] = s;
            s = 1812433253u * (s ^ (s >> 30)) + i + 1;
        }
        at = 624;
    }
    uint32_t next() {
        if (at == 624) {
            for (int i = 0; i < 624; i++) {
                uint32_t y = (state[i] & 0x80000000u) | (state[(i + 1) % 624] & 0x7fffffffu);
                state[i] = state[(i + 397) % 624] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
            }
            at = 0;
        }
        uint32_t y = state[at++];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        return y ^ (y >> 18);
    }
};
inline Random& dice() {
    static Random found;
    return found;
}
inline void seed(I s) { dice().seed(uint32_t(s)); }
inline double random() {
    uint32_t a = dice().next() >> 5, b = dice().next() >> 6;
    return (a * 67108864.0 + b) / 9007199254740992.0;
}
inline I randint(I low, I high) {
    uint64_t most = uint64_t(high - low) - 1, mask = 0;
    while (mask < most) mask = 2 * mask + 1;
    uint64_t found;
    do found = dice().next() & mask;
    while (found > most);
    return low + I(found);
}
inline double exponential(double scale) { return -log(1.0 - random()) * scale; }

}  // namespace rt

// Python's side: the few functions of its stable interface that a loop needs (PEP 384, 3.11).

extern "C" {
typedef struct _object PyObject;
typedef intptr_t Py_ssize_t;
typedef struct {
    void* buf;
    PyObject* obj;
    Py_ssize_t len, itemsize;
    int readonly, ndim;
    char* format;
    Py_ssize_t *shape, *strides, *suboffsets;
    void* internal;
} Py_buffer;
int PyObject_GetBuffer(PyObject*, Py_buffer*, int);
void PyBuffer_Release(Py_buffer*);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject*);
PyObject* PyTuple_New(Py_ssize_t);
int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);
double PyFloat_AsDouble(PyObject*);
PyObject* PyFloat_FromDouble(double);
long long PyLong_AsLongLong(PyObject*);
PyObject* PyLong_FromLongLong(long long);
PyObject* PyBool_FromLong(long);
int PyObject_IsTrue(PyObject*);
PyObject* PyByteArray_FromStringAndSize(const char*, Py_ssize_t);
PyObject* PyErr_Occurred(void);
void PyErr_SetString(PyObject*, const char*);
extern PyObject* PyExc_TypeError;
extern PyObject* PyExc_MemoryError;
void Py_IncRef(PyObject*);
extern PyObject _Py_NoneStruct;
}

namespace py {

struct Mismatch {};

template <class T>
constexpr char code() {
    if constexpr (std::is_same_v<T, bool>) return '?';
    else if constexpr (std::is_same_v<T, double>) return 'd';
    else if constexpr (std::is_same_v<T, float>) return 'f';
    else if constexpr (std::is_same_v<T, uint8_t>) return 'B';
    else if constexpr (std::is_same_v<T, int8_t>) return 'b';
    else if constexpr (std::is_same_v<T, int16_t>) return 'h';
    else if constexpr (std::is_same_v<T, int32_t>) return 'i';
    else return 'l';
}

// What arguments become; an array is Python's own memory, held until the call is over.
struct Held {
    Py_buffer one[96];
    int used = 0;
    ~Held() {
        while (used) PyBuffer_Release(&one[--used]);
    }
};

template <class T>
struct In {
    static T get(PyObject* x, Held&) {
        if constexpr (std::is_same_v<T, double>) {
            double found = PyFloat_AsDouble(x);
            if (found == -1.0 && PyErr_Occurred()) throw Mismatch();
            return found;
        } else if constexpr (std::is_same_v<T, bool>) {
            return PyObject_IsTrue(x) == 1;
        } else {
            I found = PyLong_AsLongLong(x);
            if (found == -1 && PyErr_Occurred()) throw Mismatch();
            return found;
        }
    }
};
template <class T, int N>
struct In<rt::A<T, N>> {
    static rt::A<T, N> get(PyObject* x, Held& held) {
        Py_buffer& b = held.one[held.used];
        if (held.used == 96 || PyObject_GetBuffer(x, &b, 0x1c) != 0) throw Mismatch();
        held.used++;
        const char* form = b.format && (*b.format == '=' || *b.format == '@') ? b.format + 1 : b.format;
        char got = form ? *form : 'B';
        if (got == 'q') got = 'l';
        bool fits = b.ndim == N && got == code<T>() && b.itemsize == sizeof(T);
        rt::A<T, N> a;
        I size = 1;
        for (int d = 0; fits && d < N; d++) {
            a.n[d] = b.shape[d];
            a.s[d] = b.strides[d] / I(sizeof(T));
            size *= a.n[d];
            fits = b.strides[d] % I(sizeof(T)) == 0;
        }
        if (!fits || (size > 0 && a.n[N - 1] > 1 && a.s[N - 1] != 1)) {
            PyErr_SetString(PyExc_TypeError, "an array of another type or layout");
            throw Mismatch();
        }
        a.s[N - 1] = 1;
        a.p = static_cast<T*>(b.buf);
        return a;
    }
};
template <class... T>
struct In<std::tuple<T...>> {
    static std::tuple<T...> get(PyObject* x, Held& held) {
        Py_ssize_t at = 0;
        return std::tuple<T...>{In<T>::get(item(x, at++), held)...};
    }
    static PyObject* item(PyObject* x, Py_ssize_t at) {
        PyObject* found = PyTuple_GetItem(x, at);
        if (!found) throw Mismatch();
        return found;
    }
};

inline PyObject* out(double x) { return PyFloat_FromDouble(x); }
inline PyObject* out(I x) { return PyLong_FromLongLong(x); }
inline PyObject* out(bool x) { return PyBool_FromLong(x); }
template <class T, int N>
PyObject* out(const rt::A<T, N>& given) {  // (type, shape, bytes)
    rt::A<T, N> a = rt::copy(given);
    PyObject* shape = PyTuple_New(N);
    for (int d = 0; d < N; d++) PyTuple_SetItem(shape, d, PyLong_FromLongLong(a.n[d]));
    PyObject* found = PyTuple_New(3);
    PyTuple_SetItem(found, 0, PyLong_FromLongLong(code<T>()));
    PyTuple_SetItem(found, 1, shape);
    PyTuple_SetItem(found, 2, PyByteArray_FromStringAndSize(
        reinterpret_cast<const char*>(a.p), a.size() * I(sizeof(T))));
    return found;
}
template <class... T>
PyObject* out(const std::tuple<T...>& t);
template <class S>
PyObject* out(const S& s, decltype(&S::named) = nullptr) {
    return out(s.all());
}
template <class... T>
PyObject* out(const std::tuple<T...>& t) {
    PyObject* found = PyTuple_New(sizeof...(T));
    Py_ssize_t at = 0;
    std::apply([&](const auto&... one) { (PyTuple_SetItem(found, at++, out(one)), ...); }, t);
    return found;
}

template <class Args, class F>
PyObject* call(PyObject* given, F f) {
    try {
        Held held;
        Args args = In<Args>::get(given, held);
        if constexpr (std::is_void_v<decltype(std::apply(f, args))>) {
            std::apply(f, args);
            Py_IncRef(&_Py_NoneStruct);
            return &_Py_NoneStruct;
        } else {
            return out(std::apply(f, args));
        }
    } catch (const Mismatch&) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "arguments of other types");
    } catch (const std::bad_alloc&) {
        PyErr_SetString(PyExc_MemoryError, "too little memory");
    }
    return nullptr;
}

}  // namespace py
