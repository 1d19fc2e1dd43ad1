package hostmount

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestUsed(t *testing.T) {
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
			u := use{map[string]bool{}, map[string]bool{}}
			require.NoError(t, d.used([]byte(c.mountinfo), u))
			assert.Equal(t, c.want, u.keys)
		})
	}
	for _, bad := range []string{"x", "1 2 3", "30 20 0:40 / /a rw - tmpfs", "30 20 0:40 - tmpfs ocihold rw"} {
		require.Error(t, d.used([]byte(bad), use{map[string]bool{}, map[string]bool{}}), bad)
	}
}

func TestTopLower(t *testing.T) {
	for options, want := range map[string]string{
		"ro,lowerdir=/s/overlay/a/merged:/run/image-volumes":            "/s/overlay/a/merged",
		"rw,seclabel,lowerdir=/a:/b,upperdir=/u,workdir=/w":             "/a",
		"ro,lowerdir+=/s/overlay/a/merged,lowerdir+=/run/image-volumes": "/s/overlay/a/merged",
		`ro,lowerdir=/my\040disk\134s/a:/b`:                             `/my disk\s/a`,
		"rw,upperdir=/u":                                                "",
		"":                                                              "",
	} {
		assert.Equal(t, want, topLower(options), options)
	}
	d := &Dir{path: "/run/ocihold/mounts"}
	u := use{map[string]bool{}, map[string]bool{}}
	require.NoError(t, d.used([]byte("600 599 0:50 / / rw,relatime - overlay overlay rw,lowerdir=l/X:l/Y,upperdir=/u\n"+
		"610 600 0:41 / /ours ro - overlay /run/ocihold/mounts/k ro,lowerdir=/k:/l\n"+
		"611 600 0:42 / /native ro - overlay overlay ro,lowerdir=/n/merged:/e\n"), u))
	assert.Equal(t, map[string]bool{"l/X": true, "/n/merged": true}, u.lowers)
}

func TestInUseRefusesAnIncompleteReading(t *testing.T) {
	_, _, err := (&Dir{}).inUse(t.Context(), t.TempDir()+"/none")
	require.Error(t, err)
}
