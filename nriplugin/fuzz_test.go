package nriplugin

import (
	"encoding/json"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/stretchr/testify/require"
)

// Whatever the runtime says of a container's mounts, the images found in it have
// IDs, and come out as they are listed.
func FuzzNatives(f *testing.F) {
	const image = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
	f.Add(`[{"container_path":"/n","host_path":"/s/overlay/l/merged","readonly":true,"image":{"image":"` + image + `"}}]`)
	f.Add(`[{"container_path":"/h","host_path":"/srv"},{"image":{}},{"image":null},{}]`)
	f.Add(`[{"image":{"image":"sha512:0123"}},{"image":{"image":"` + image + `\n"}}]`)
	f.Add(`{}`)
	f.Add(`[[]]`)
	f.Fuzz(func(t *testing.T, list string) {
		found := containerOf(&api.Container{Annotations: map[string]string{volumesAnnotation: list}}).Natives
		if len(found) == 0 {
			return
		}
		type entry struct {
			ContainerPath string            `json:"container_path"`
			HostPath      string            `json:"host_path"`
			Image         map[string]string `json:"image"`
		}
		entries := make([]entry, len(found))
		for i, n := range found {
			require.Regexp(t, `\A[0-9a-f]{64}\z`, n.ImageID)
			entries[i] = entry{n.MountPath, n.HostPath, map[string]string{"image": n.ImageID}}
		}
		text, err := json.Marshal(entries)
		require.NoError(t, err)
		require.Equal(t, found, natives(map[string]string{volumesAnnotation: string(text)}))
	})
}
