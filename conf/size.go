package conf

import (
	"fmt"
	"strings"

	"github.com/docker/go-units"
)

// Size is a number of bytes. In a file it is a text such as "100GB", which is
// 100 times 1000³, or "100GiB", which is 100 times 1024³.
type Size int64

// UnmarshalText reads the text of a size.
func (s *Size) UnmarshalText(text []byte) error {
	// Each of the library's functions would take both units for the same.
	parse := units.FromHumanSize
	if strings.HasSuffix(strings.ToLower(string(text)), "ib") {
		parse = units.RAMInBytes
	}
	bytes, err := parse(string(text))
	if err != nil {
		return err
	}
	*s = Size(bytes)
	return nil
}

// MarshalText is the inverse of UnmarshalText.
func (s Size) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%dB", int64(s)), nil }

func (s Size) String() string { return units.HumanSize(float64(s)) }
