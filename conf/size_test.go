package conf

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestSize(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "12": 12, "1kB": 1000, "1KiB": 1024, "1.5GB": 1_500_000_000, "1.5 GiB": 3 << 29, "2g": 2_000_000_000, "2gib": 2 << 30,
	} {
		var s Size
		require.NoError(t, s.UnmarshalText([]byte(text)), text)
		assert.Equal(t, want, s, text)
	}
	for _, text := range []string{"", "much", "-1GB", "1XB", "GiB"} {
		assert.Error(t, new(Size).UnmarshalText([]byte(text)), text)
	}
}
