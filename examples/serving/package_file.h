// Checks that a package is what was written: torch's loader reads a file with wrong bytes without a word.
//
// A package is a ZIP archive whose files are stored as they are, each with its CRC-32
// (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT).

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

class PackageFile {
 public:
  explicit PackageFile(const std::string& path) : path_(path), file_(path, std::ios::binary | std::ios::ate) {
    if (!file_) throw std::runtime_error("no file " + path);
    size_ = static_cast<uint64_t>(file_.tellg());
  }

  // Throws std::runtime_error if a file in the archive has other bytes than were written.
  void check() {
    uint64_t at = 0, entries = directory(at);
    bool has_model = false;
    for (; entries; --entries) {
      const std::vector<char> entry = bytes(at, 46);
      if (number<uint32_t>(entry, 0) != 0x02014b50) refuse("a damaged list of files");
      const uint64_t name = number<uint16_t>(entry, 28), extra = number<uint16_t>(entry, 30);
      const std::vector<char> text = bytes(at + 46, name);
      const std::string path(text.begin(), text.end());
      has_model |= path.find("/aotinductor/") != std::string::npos;
      const std::vector<char> more = bytes(at + 46 + name, extra);
      // Larger numbers than 32 bits hold follow in this order.
      uint64_t values[3] = {number<uint32_t>(entry, 24), number<uint32_t>(entry, 20), number<uint32_t>(entry, 42)};
      for (size_t e = 0; e + 4 <= more.size(); e += 4 + number<uint16_t>(more, e + 2)) {
        size_t next = e + 4;
        for (uint64_t& value : values)
          if (number<uint16_t>(more, e) == 1 && value == 0xffffffff) value = number<uint64_t>(more, next), next += 8;
      }
      if (number<uint16_t>(entry, 10) || values[0] != values[1]) refuse("a compressed file");
      if (checksum(values[2], values[0]) != number<uint32_t>(entry, 16))
        refuse("other bytes than were written in " + path);
      at += 46 + name + extra + number<uint16_t>(entry, 32);
    }
    if (!has_model) refuse("an archive without a model");
  }

 private:
  [[noreturn]] void refuse(const std::string& found) const {
    throw std::runtime_error(path_ + " is no package, or damaged: found " + found + "; copy the file again");
  }

  std::vector<char> bytes(uint64_t at, uint64_t count) {
    if (at > size_ || count > size_ - at) refuse("an end before all files");
    std::vector<char> found(count);
    file_.seekg(static_cast<std::streamoff>(at));
    if (!file_.read(found.data(), static_cast<std::streamsize>(count))) refuse("an error of the disk");
    return found;
  }

  template <typename T>
  T number(const std::vector<char>& from, size_t at) const {
    T value;
    if (at + sizeof(T) > from.size()) refuse("a damaged list of files");
    std::memcpy(&value, from.data() + at, sizeof(T));
    return value;
  }

  // Finds the list of files at the end of the archive: where it begins, and how many files it has.
  uint64_t directory(uint64_t& begin) {
    const uint64_t tail = std::min<uint64_t>(size_, 22 + 0xffff);
    const std::vector<char> end = bytes(size_ - tail, tail);
    for (size_t at = tail < 22 ? 0 : tail - 21; at-- > 0;) {
      if (number<uint32_t>(end, at) != 0x06054b50) continue;
      begin = number<uint32_t>(end, at + 16);
      if (at < 20 || number<uint32_t>(end, at - 20) != 0x07064b50) return number<uint16_t>(end, at + 10);
      const std::vector<char> large = bytes(number<uint64_t>(end, at - 12), 56);
      if (number<uint32_t>(large, 0) != 0x06064b50) refuse("a damaged list of files");
      begin = number<uint64_t>(large, 48);
      return number<uint64_t>(large, 32);
    }
    refuse("no list of files");
  }

  uint32_t checksum(uint64_t header, uint64_t count) {
    static const std::array<uint32_t, 256> table = [] {
      std::array<uint32_t, 256> made{};
      for (uint32_t i = 0; i < 256; ++i) {
        made[i] = i;
        for (int bit = 0; bit < 8; ++bit) made[i] = made[i] & 1 ? made[i] >> 1 ^ 0xedb88320 : made[i] >> 1;
      }
      return made;
    }();
    const std::vector<char> local = bytes(header, 30);
    if (number<uint32_t>(local, 0) != 0x04034b50) refuse("a damaged list of files");
    uint64_t at = header + 30 + number<uint16_t>(local, 26) + number<uint16_t>(local, 28);
    uint32_t found = 0xffffffff;
    while (count) {
      const std::vector<char> part = bytes(at, std::min<uint64_t>(count, 1 << 20));
      for (char byte : part) found = table[(found ^ static_cast<unsigned char>(byte)) & 255] ^ found >> 8;
      at += part.size(), count -= part.size();
    }
    return ~found;
  }

  std::string path_;
  std::ifstream file_;
  uint64_t size_ = 0;
};
