package storage

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func BenchmarkLeaseRelease(b *testing.B) {
	root, _, image, _ := pulled(b)
	for b.Loop() {
		require.NoError(b, root.Lease(b.Context(), image.ID))
		require.NoError(b, root.Release(b.Context(), image.ID))
	}
}

func BenchmarkRepull(b *testing.B) {
	root, _, image, _ := pulled(b)
	for b.Loop() {
		_, err := root.Pull(b.Context(), image.Names[0], PullOptions{})
		require.NoError(b, err)
	}
}

func BenchmarkResolve(b *testing.B) {
	root, _, image, _ := pulled(b)
	for b.Loop() {
		_, err := root.Resolve(b.Context(), image.Names[0])
		require.NoError(b, err)
	}
}
