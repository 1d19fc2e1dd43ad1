package hostmount

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestUsedKeys(t *testing.T) {
	d := &Dir{path: "/run/ocihold/mounts"}
	const rootfs = "600 599 0:50 / / rw,relatime - overlay overlay rw\n"
	for name, c := range map[string]struct {
		mountinfo string
		want      map[string]bool
	}{
		"host": {
			"20 1 8:1 / / rw - ext4 /dev/vda rw\n" +
				"30 20 0:40 / /run/ocihold/mounts rw unbindable - tmpfs ocihold rw\n" +
				"31 30 0:41 / /run/ocihold/mounts/k ro - overlay /run/ocihold/mounts/k ro\n",
			map[string]bool{},
		},
		"container of another daemon": {
			rootfs + "610 600 0:41 / /models ro,nosuid - overlay /other/mounts/k ro\n",
			map[string]bool{},
		},
		"container": {
			rootfs + "610 600 0:41 / /models ro,nosuid - overlay /run/ocihold/mounts/k ro\n",
			map[string]bool{"k": true},
		},
		"container, at the host's path": {
			rootfs + "610 600 0:41 / /run/ocihold/mounts/k ro,nosuid - overlay /run/ocihold/mounts/k ro\n",
			map[string]bool{"k": true},
		},
		"child before parent": {
			"31 30 0:41 / /run/ocihold/mounts/k ro - overlay /run/ocihold/mounts/k ro\n" +
				"30 20 0:40 / /run/ocihold/mounts rw - tmpfs ocihold rw\n",
			map[string]bool{},
		},
		"other overlays": {rootfs, map[string]bool{}},
		"nothing":        {"", map[string]bool{}},
	} {
		t.Run(name, func(t *testing.T) {
			used := map[string]bool{}
			require.NoError(t, d.usedKeys([]byte(c.mountinfo), used))
			assert.Equal(t, c.want, used)
		})
	}
	for _, bad := range []string{"x", "1 2 3", "30 20 0:40 / /a rw - tmpfs", "30 20 0:40 - tmpfs ocihold rw"} {
		require.Error(t, d.usedKeys([]byte(bad), map[string]bool{}), bad)
	}
}

func TestInUseRefusesAnIncompleteReading(t *testing.T) {
	_, err := (&Dir{}).inUse(t.Context(), t.TempDir()+"/none")
	require.Error(t, err)
}
