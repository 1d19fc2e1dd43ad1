package storage

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestClassifyDiskFull(t *testing.T) {
	for name, err := range map[string]error{
		"full":                      fmt.Errorf("write /x: %w", syscall.ENOSPC),
		"quota":                     fmt.Errorf("write /x: %w", syscall.EDQUOT),
		"told by the child process": errors.New("unpacking: write /x: no space left on device"),
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, classify("registry.example", err), ErrDiskFull)
		})
	}
	other := errors.New("something else")
	require.Equal(t, other, classify("registry.example", other))
}
