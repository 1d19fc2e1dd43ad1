package hostmount

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestOverlayOptions(t *testing.T) {
	fixed := [][2]string{{"redirect_dir", "nofollow"}, {"metacopy", "off"}, {"index", "off"}}
	room := [][2]string{{"upperdir", "/proc/self/fd/7"}, {"workdir", "/proc/self/fd/8"}}
	for name, tc := range map[string]struct {
		upper   []int
		selinux bool
		want    [][2]string
	}{
		"read-only": {nil, false, nil},
		"writable":  {[]int{7, 8}, false, room},
		"read-only with SELinux": {
			nil, true, [][2]string{{"context", "system_u:object_r:container_ro_file_t:s0"}},
		},
		"writable with SELinux": {
			[]int{7, 8}, true, append(room[:2:2], [2]string{"context", "system_u:object_r:container_file_t:s0"}),
		},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, append(fixed[:3:3], tc.want...), overlayOptions(tc.upper, tc.selinux))
		})
	}
}
