package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
	"github.com/ocihold/ocihold/storage"
)

func TestDiskUseIsWrittenAs(t *testing.T) {
	system := storage.FileSystem{Mountpoint: "/", Device: "/dev/vda1", Type: "ext4", Capacity: 100e9, Available: 40e9}
	disk := storage.FileSystem{Mountpoint: "/disk", Device: "/dev/vdb", Type: "xfs", Capacity: 20e12, Available: 1.5e12}
	const id = "0123456789abcdef"
	use := control.DiskUse{Roots: []storage.RootUsage{
		{
			Handler: "default", Root: "/var/lib/containers/storage", FileSystem: system,
			Bytes: 3.25e9, SharedBytes: 1e9, ReclaimableBytes: 250e6,
			Images: []storage.ImageUsage{
				{ID: id, Bytes: 10e6, OwnBytes: 10e6},
				{ID: id, Names: []string{"reg.example/a:1", "reg.example/a:2"}, Bytes: 2.24e9, OwnBytes: 1.24e9, Used: true, InTwoRoots: true},
				{ID: id, Names: []string{"reg.example/b:1"}, Bytes: 1e9, LeansOn: []string{"vm", "wasm"}},
			},
		},
		{
			Handler: "vm", Root: "/disk/vm", FileSystem: disk, Bytes: 12e9, ReclaimableBytes: 7e9,
			Images: []storage.ImageUsage{
				{ID: id, Names: []string{"reg.example/a:1"}, Bytes: 5e9, OwnBytes: 5e9, Leased: true, InTwoRoots: true},
			},
			Leaning: []string{"reg.example/b:1"},
		},
		{Handler: "wasm", Root: "/roots/wasm", FileSystem: system, Bytes: 4096, Leaning: []string{"reg.example/b:1"}},
	}}
	var table, tree, scratch bytes.Buffer
	require.NoError(t, writeTable(&table, diskRows(use)))
	require.NoError(t, writeDiskTree(&tree, use))
	require.NoError(t, writeScratch(&scratch, control.Scratch{Directory: "/var/lib/ocihold/scratch"}))
	assert.Empty(t, scratch.String())
	require.NoError(t, writeScratch(&scratch, control.Scratch{
		Directory: "/var/lib/ocihold/scratch", Scratch: hostmount.Scratch{Volumes: 3, Bytes: 2.5e9, PromisedBytes: 12e9},
	}))
	for file, got := range map[string]string{"df.table": table.String(), "df.tree": tree.String(), "df.scratch": scratch.String()} {
		want, err := os.ReadFile(filepath.Join("testdata", file))
		require.NoError(t, err)
		assert.Equal(t, string(want), got)
	}
}
