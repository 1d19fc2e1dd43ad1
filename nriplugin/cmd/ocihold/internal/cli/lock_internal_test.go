package cli

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestLockOfAKilledDaemon has the lock held for a moment longer, as by a
// program that a killed daemon was about to start.
func TestLockOfAKilledDaemon(t *testing.T) {
	dir := t.TempDir()
	unlock, err := lockRunDir(dir)
	require.NoError(t, err)
	_, err = lockRunDir(dir)
	require.ErrorContains(t, err, "another ocihold runs in "+dir)

	locked := make(chan error, 1)
	go func() {
		again, err := lockRunDir(dir)
		if err == nil {
			again()
		}
		locked <- err
	}()
	require.Eventually(t, func() bool { return opened(t, filepath.Join(dir, "lock")) == 2 }, time.Minute, time.Millisecond)
	unlock()
	assert.NoError(t, <-locked)
}

// opened counts how often this process has a file open.
func opened(t *testing.T, path string) (n int) {
	t.Helper()
	files, err := filepath.Glob("/proc/self/fd/*")
	require.NoError(t, err)
	for _, file := range files {
		if target, err := os.Readlink(file); err == nil && target == path {
			n++
		}
	}
	return n
}
