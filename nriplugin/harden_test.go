package nriplugin_test

import (
	"maps"
	"path/filepath"
	"testing"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/nriplugin"
)

func TestHardening(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "nri.sock")
	runtime := startRuntime(t, socket)
	defer runtime.Stop()
	registered(t, runtime, startWith(t, nriplugin.Options{Socket: socket, HardenNative: true}, &recorder{}))

	const image = `[{"container_path":"/n","host_path":"/s/merged","image":{"image":"` + imageID + `"}}]`
	overlay := func(destination, lower string) *api.Mount {
		return &api.Mount{Type: "overlay", Source: "overlay", Destination: destination, Options: []string{"lowerdir=" + lower + ":/empty"}}
	}
	hosts := &api.Mount{Type: "bind", Source: "/hosts", Destination: "/etc/hosts", Options: []string{"bind"}}
	with := func(m *api.Mount, options ...string) *api.Mount {
		return &api.Mount{Type: m.GetType(), Source: m.GetSource(), Destination: m.GetDestination(), Options: append(m.GetOptions()[:len(m.GetOptions()):len(m.GetOptions())], options...)}
	}
	artifact := &api.Mount{Type: "bind", Source: "/blobs/f", Destination: "/n/dir/f", Options: []string{"bind", "ro"}}
	const exec = "native-exec.ocihold.dev"

	for name, tc := range map[string]struct {
		volumes string
		mounts  []*api.Mount
		pod     map[string]string
		userns  bool
		want    []*api.Mount
		fault   string
	}{
		"none": {volumes: "[]", mounts: []*api.Mount{overlay("/n", "/s/merged")}},
		"image": {
			volumes: image, mounts: []*api.Mount{hosts, overlay("/n", "/s/merged")},
			want: []*api.Mount{with(overlay("/n", "/s/merged"), "ro", "nosuid", "nodev", "noexec")},
		},
		"a slash at the end": {
			volumes: image, mounts: []*api.Mount{overlay("/n/", "/s/merged")},
			want: []*api.Mount{with(overlay("/n/", "/s/merged"), "ro", "nosuid", "nodev", "noexec")},
		},
		"programs may run": {
			volumes: image, mounts: []*api.Mount{overlay("/n", "/s/merged")}, pod: map[string]string{exec + "/container.ctr": "true"},
			want: []*api.Mount{with(overlay("/n", "/s/merged"), "ro", "nosuid", "nodev")},
		},
		"faulty annotation": {
			volumes: image, mounts: []*api.Mount{overlay("/n", "/s/merged")}, pod: map[string]string{exec: "1"},
			fault: `native image volumes of container ctr of pod ns/pod: annotation native-exec.ocihold.dev: "1" is neither "true" nor "false"`,
		},
		"faulty annotation and no native volume": {volumes: "[]", pod: map[string]string{exec: "1"}},
		"artifact": {
			volumes: `[{"container_path":"/n","host_path":"/blobs/f","image":{"image":"sha512:0123"}}]`,
			mounts:  []*api.Mount{artifact}, want: []*api.Mount{with(artifact, "ro", "nosuid", "nodev", "noexec")},
		},
		"two files of an artifact at one path": {
			volumes: `[{"container_path":"/n","host_path":"/blobs/f","image":{"image":"sha512:0123"}}]`,
			mounts:  []*api.Mount{artifact, artifact},
			fault:   "CRI-O mounts two things at /n/dir/f: have the artifact's files have titles of their own, or set harden_native = false in [volumes]",
		},
		"another image at the path":   {volumes: image, mounts: []*api.Mount{overlay("/n", "/s/merged2")}},
		"the image at another path":   {volumes: image, mounts: []*api.Mount{overlay("/n2", "/s/merged"), overlay("/n/in", "/s/merged")}},
		"another kind of mount":       {volumes: image, mounts: []*api.Mount{{Type: "erofs", Source: "/s/merged", Destination: "/n"}}},
		"a volume that is no image's": {volumes: `[{"container_path":"/n","host_path":"/s/merged"}]`, mounts: []*api.Mount{overlay("/n", "/s/merged")}},
		"user namespace":              {volumes: image, mounts: []*api.Mount{overlay("/n", "/s/merged")}, userns: true},
	} {
		t.Run(name, func(t *testing.T) {
			annotations := maps.Clone(container.GetAnnotations())
			annotations["io.kubernetes.cri-o.Volumes"] = tc.volumes
			c := &api.Container{Id: "c", PodSandboxId: "p", Annotations: annotations, Mounts: tc.mounts}
			if tc.userns {
				c.Linux = &api.LinuxContainer{Namespaces: []*api.LinuxNamespace{{Type: "user", Path: "/ns"}}}
			}
			p := &api.PodSandbox{Id: "p", Name: "pod", Namespace: "ns", Annotations: tc.pod}
			answer, err := runtime.CreateContainer(t.Context(), &adaptation.CreateContainerRequest{Pod: p, Container: c})
			if tc.fault != "" {
				require.ErrorContains(t, err, tc.fault)
				return
			}
			require.NoError(t, err)
			got := answer.GetAdjust().GetMounts()
			require.Len(t, got, len(tc.want))
			for i, want := range tc.want {
				assert.Equal(t, want.String(), got[i].String())
			}
		})
	}
}
