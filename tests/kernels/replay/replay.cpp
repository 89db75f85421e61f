// Calls functions of a library of C++ kernels with recorded arguments, and compares what they write and return with what
// was recorded: `replay LIBRARY RECORDING`. recording.py describes the file. FUNCTIONS names the functions of operators.h,
// as FUNCTION(rms_norm) FUNCTION(layer_norm) and so on.
//
// Every buffer ends where a page begins that nobody may touch, and bytes in front of it are looked at afterwards.

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "operators.h"

namespace {

constexpr int MAX_SHOWN = 20;             // failures
constexpr unsigned char CANARY = 0x5a;    // in front of a buffer
enum { BYTES, FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };  // Check.kind
enum { INTEGER, REAL, ADDRESS };                      // kinds of arguments

char current[200];  // name of the case, for the handler of signals

[[noreturn]] void give_up(const std::string& reason) {
    std::fprintf(stderr, "replay: %s\n", reason.c_str());
    std::exit(2);
}

class File {
  public:
    explicit File(const char* path) : file(std::fopen(path, "rb")) {
        if (!file) give_up(std::string("cannot open ") + path);
    }
    ~File() { std::fclose(file); }

    void read(void* to, size_t size) {
        if (size && std::fread(to, 1, size, file) != size) give_up("the recording is cut off");
    }
    int64_t integer() { return value<int64_t>(); }
    double real() { return value<double>(); }
    std::string text() {
        std::string found(integer(), ' ');
        read(&found[0], found.size());
        return found;
    }

  private:
    std::FILE* file;

    template <typename T>
    T value() {
        T found;
        read(&found, sizeof found);
        return found;
    }
};

// Bytes that end where a page begins that nobody may touch.
class Buffer {
  public:
    explicit Buffer(int64_t size) : size(size) {
        const int64_t page = sysconf(_SC_PAGESIZE), room = (size + page - 1) / page * page + page;
        mapped = room + page;
        start = (char*)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED || mprotect(start + room, page, PROT_NONE)) give_up("there is no memory");
        data = start + room - size;
        std::memset(start, CANARY, data - start);
    }
    Buffer(Buffer&& other) noexcept
        : data(other.data), size(other.size), start(std::exchange(other.start, nullptr)), mapped(other.mapped) {}
    ~Buffer() {
        if (start) munmap(start, mapped);
    }

    bool written_in_front() const {
        for (const char* byte = start; byte < data; byte++)
            if ((unsigned char)*byte != CANARY) return true;
        return false;
    }

    char* data;
    int64_t size;

  private:
    char* start;
    int64_t mapped;
};

// What a buffer holds after the call: bytes, or numbers that are off by at most `absolute` + `relative` * their size.
struct Check {
    int64_t kind;
    std::vector<char> bytes;
    std::vector<double> numbers;
    double absolute, relative;
};

struct Argument {
    int64_t kind, integer;
    double real;
    void* address;
};

double half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 31  ? (fraction ? NAN : INFINITY)
                        : exponent == 0 ? std::ldexp(fraction, -24)
                                        : std::ldexp(1024 + fraction, exponent - 25);
    return bits >> 15 ? -size : size;
}

double number(const char* from, int64_t kind, int64_t i) {
    uint16_t bits = 0;
    if (kind == BFLOAT16 || kind == FLOAT16) std::memcpy(&bits, from + 2 * i, sizeof bits);
    if (kind == FLOAT16) return half(bits);
    if (kind == FLOAT64) {
        double found;
        std::memcpy(&found, from + 8 * i, sizeof found);
        return found;
    }
    float found;
    if (kind == BFLOAT16) {
        const uint32_t wide = uint32_t(bits) << 16;
        std::memcpy(&found, &wide, sizeof found);
    } else {
        std::memcpy(&found, from + 4 * i, sizeof found);
    }
    return found;
}

// Why a buffer is not what it has to be; empty if it is.
std::string fault(const Buffer& buffer, const Check& check) {
    char text[200];
    if (buffer.written_in_front()) return "bytes in front of it were written";
    if (check.kind == BYTES) {
        for (int64_t i = 0; i < buffer.size; i++)
            if (buffer.data[i] != check.bytes[i]) {
                std::snprintf(text, sizeof text, "byte %lld: expected %d, got %d", (long long)i,
                              (unsigned char)check.bytes[i], (unsigned char)buffer.data[i]);
                return text;
            }
        return "";
    }
    for (size_t i = 0; i < check.numbers.size() && check.absolute < INFINITY; i++) {
        const double wanted = check.numbers[i], got = number(buffer.data, check.kind, i);
        const bool same = wanted == got || (wanted != wanted && got != got);
        if (same || std::fabs(got - wanted) <= check.absolute + check.relative * std::fabs(wanted)) continue;
        std::snprintf(text, sizeof text, "element %zu: expected %.9g, got %.9g (allowed: %.3g + %.3g of it)", i, wanted,
                      got, check.absolute, check.relative);
        return text;
    }
    return "";
}

template <typename T>
T as(const Argument& argument) {
    const int64_t kind = std::is_pointer<T>() ? ADDRESS : std::is_floating_point<T>() ? REAL : INTEGER;
    if (argument.kind != kind) give_up("an argument of " + std::string(current) + " is of another kind");
    if constexpr (std::is_pointer<T>())
        return (T)argument.address;
    else if constexpr (std::is_floating_point<T>())
        return argument.real;
    else
        return argument.integer;
}

template <typename Result, typename... Types, size_t... I>
int64_t call(Result (*run)(Types...), const std::vector<Argument>& arguments, std::index_sequence<I...>) {
    if (arguments.size() != sizeof...(Types)) give_up(std::string(current) + " has not as many arguments");
    if constexpr (std::is_void<Result>()) {
        run(as<Types>(arguments[I])...);
        return 0;
    } else {
        return run(as<Types>(arguments[I])...);
    }
}

template <typename Result, typename... Types>
int64_t call(Result (*run)(Types...), const std::vector<Argument>& arguments) {
    return call(run, arguments, std::index_sequence_for<Types...>{});
}

int64_t call(const std::string& name, void* library, const std::vector<Argument>& arguments) {
    void* found = dlsym(library, ("coppice_" + name).c_str());
    if (!found) give_up("the library lacks " + name);
#define FUNCTION(each) \
    if (name == #each) return call((decltype(&coppice_##each))found, arguments);
    FUNCTIONS
    give_up("operators.h lacks " + name);
}

void check_structures(File& file, void* library) {
    const int64_t* found = (const int64_t*)dlsym(library, "coppice_structures");
    const int64_t count = file.integer();
    if (!found || found[0] != count) give_up("the library has other structures");
    for (int64_t i = 1; i <= count; i++)
        if (file.integer() != found[i]) give_up("the library lays out structures otherwise");
}

Check read_check(File& file, const Buffer& buffer) {
    Check check{file.integer(), {}, {}, 0, 0};
    if (check.kind < 0) {  // as it is before the call
        check.kind = BYTES;
        check.bytes.assign(buffer.data, buffer.data + buffer.size);
    } else if (check.kind == BYTES) {
        check.bytes.resize(buffer.size);
        file.read(check.bytes.data(), check.bytes.size());
    } else {
        check.absolute = file.real(), check.relative = file.real();
        check.numbers.resize(file.integer());
        file.read(check.numbers.data(), 8 * check.numbers.size());
    }
    return check;
}

// Reads a case and runs it. Returns what is wrong.
std::string replay(File& file, void* library) {
    const std::string name = file.text(), function = file.text();
    std::snprintf(current, sizeof current, "%s: %s", function.c_str(), name.c_str());
    const int64_t returns = file.integer(), wanted = file.integer();
    std::vector<Buffer> buffers;
    const int64_t count = file.integer();
    for (int64_t i = 0; i < count; i++) {
        buffers.emplace_back(file.integer());
        file.read(buffers[i].data, buffers[i].size);
        for (int64_t links = file.integer(); links > 0; links--) {  // addresses of earlier buffers
            const int64_t at = file.integer();
            std::memcpy(buffers[i].data + at, &buffers[file.integer()].data, sizeof(char*));
        }
    }
    std::vector<Check> checks;
    for (const Buffer& buffer : buffers) checks.push_back(read_check(file, buffer));
    std::vector<Argument> arguments(file.integer());
    for (Argument& argument : arguments) {
        argument.kind = file.integer();
        if (argument.kind == REAL) {
            argument.real = file.real();
        } else {
            argument.integer = file.integer();
            if (argument.kind == ADDRESS)
                argument.address = argument.integer < 0 ? nullptr : buffers[argument.integer].data;
        }
    }
    const int64_t got = call(function, library, arguments);
    if (returns && got != wanted) return "expected " + std::to_string(wanted) + ", returned " + std::to_string(got);
    for (size_t i = 0; i < buffers.size(); i++) {
        const std::string wrong = fault(buffers[i], checks[i]);
        if (!wrong.empty()) return "buffer " + std::to_string(i) + ", " + wrong;
    }
    return "";
}

void crash(int) {
    const char *before = "replay: crashed in ", *after = "\n";
    for (const char* part : {before, (const char*)current, after})
        if (write(2, part, std::strlen(part)) < 0) break;
    _exit(3);
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) give_up("expected LIBRARY RECORDING");
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) give_up(dlerror());
    for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) signal(number, crash);
    File file(arguments[2]);
    check_structures(file, library);
    const int64_t cases = file.integer();
    int64_t failed = 0;
    for (int64_t i = 0; i < cases; i++) {
        const std::string wrong = replay(file, library);
        if (wrong.empty()) continue;
        if (failed++ < MAX_SHOWN) std::printf("%s: %s\n", current, wrong.c_str());
    }
    std::printf("%lld of %lld cases failed\n", (long long)failed, (long long)cases);
    return failed ? 1 : 0;
}
