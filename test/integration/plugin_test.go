package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// nriTimeOut is how long CRI-O waits for a plugin before it goes on without it
// (nri_plugin_request_timeout).
const nriTimeOut = 2 * time.Second

// guardRefuses creates a container and asserts that the guard is what refuses
// it, and that nothing of it is left.
func guardRefuses(t testing.TB, n *realnode.Node, pod *realnode.Pod, spec realnode.ContainerSpec) {
	t.Helper()
	_, err := pod.Create(t.Context(), spec)
	require.Error(t, err, "a container without its volume")
	meta, name := pod.Config.GetMetadata(), spec.Name
	if name == "" {
		name = "main"
	}
	assert.Contains(t, err.Error(), "ocihold-guard: image volume /models of container "+name+" of pod "+meta.GetNamespace()+"/"+meta.GetName()+
		": requested by annotation ")
	assert.Contains(t, err.Error(), " but not injected: is ocihold running? Start it (systemctl status ocihold); kubelet tries again")
	list, err := n.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: pod.ID}})
	require.NoError(t, err)
	for _, c := range list.GetContainers() {
		assert.NotEqual(t, name, c.GetMetadata().GetName(), "a container was made")
	}
}

// recovers creates the container as kubelet does, which tries again after any
// error.
func recovers(t testing.TB, pod *realnode.Pod, spec realnode.ContainerSpec) {
	t.Helper()
	var c *realnode.Container
	require.Eventually(t, func() bool {
		var err error
		c, err = pod.Create(t.Context(), spec)
		return err == nil
	}, 30*time.Second, 100*time.Millisecond, "the container is not created again")
	require.NoError(t, c.Start(t.Context()))
	assert.Equal(t, "one", sh(t, c, "cat /models/version"))
}

// freeze stops the daemon while it holds no lock of the storage: a process that
// is stopped with one stops all who share the root, CRI-O among them.
func freeze(t testing.TB, n *realnode.Node) {
	t.Helper()
	record, err := os.ReadFile(n.Dir() + "/run/ocihold.pid")
	require.NoError(t, err)
	var process struct{ PID int }
	require.NoError(t, json.Unmarshal(record, &process))
	holds := regexp.MustCompile(fmt.Sprintf(`POSIX +ADVISORY +\w+ %d `, process.PID))
	require.Eventually(t, func() bool {
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGSTOP))
		locks, err := os.ReadFile("/proc/locks")
		require.NoError(t, err)
		if !holds.Match(locks) {
			return true
		}
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGCONT))
		return false
	}, 10*time.Second, 10*time.Millisecond)
}

// TestPluginAway takes the daemon away in every manner, before or after the pod
// is there. What was asked for is refused by the guard, all else starts; and all
// is well again with the daemon, without a hand.
func TestPluginAway(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "plugin/model:1", version("one"))
	forBoth := volumes(t, volume{Image: ref, MountPath: "/models"})
	forOne := map[string]string{serverKey: forBoth[domain]}
	always := runPod(t, n, realnode.PodSpec{Annotations: forBoth})
	lasting := run(t, always, realnode.ContainerSpec{})

	signal := func(sig syscall.Signal) func(testing.TB) {
		return func(t testing.TB) { require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, sig)) }
	}
	frozen := func(t testing.TB) { freeze(t, n) }
	for _, tc := range []struct {
		name        string
		leave, back func(testing.TB)
		byPod       bool // the first that CRI-O would tell it is of a pod, not of a container
	}{
		{"killed", signal(syscall.SIGKILL), func(t testing.TB) { require.NoError(t, n.Start(t.Context(), realnode.Ocihold)) }, false},
		{"stopped", frozen, signal(syscall.SIGCONT), false},
		{"stopped when a pod comes", frozen, signal(syscall.SIGCONT), true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			awaitRegistered(t, n)
			both := runPod(t, n, realnode.PodSpec{Annotations: forBoth})
			tc.leave(t)
			away := true
			t.Cleanup(func() {
				if away {
					tc.back(t)
				}
			})
			if tc.byPod {
				require.NoError(t, runPod(t, n, realnode.PodSpec{}).Remove(t.Context()))
			}
			guardRefuses(t, n, both, realnode.ContainerSpec{})
			guardRefuses(t, n, both, realnode.ContainerSpec{}) // and again
			later := runPod(t, n, realnode.PodSpec{Annotations: forOne})
			guardRefuses(t, n, later, realnode.ContainerSpec{Name: "server"})

			start := time.Now()
			other := run(t, later, realnode.ContainerSpec{Name: "other"})
			assert.Equal(t, "no\n", sh(t, other, "test -e /models && echo yes || echo no"))
			plain := runPod(t, n, realnode.PodSpec{})
			run(t, plain, realnode.ContainerSpec{})
			assert.Less(t, time.Since(start), nriTimeOut, "CRI-O no longer waits for the plugin")
			assert.Equal(t, "one", sh(t, lasting, "cat /models/version"))

			tc.back(t)
			away = false
			recovers(t, both, realnode.ContainerSpec{})
			recovers(t, later, realnode.ContainerSpec{Name: "server"})
			awaitRegistered(t, n)
			assert.Equal(t, "one", sh(t, lasting, "cat /models/version"))
			for _, pod := range []*realnode.Pod{both, later, plain} {
				require.NoError(t, pod.Remove(t.Context()))
			}
		})
	}
	require.NoError(t, always.Remove(t.Context()))
	n.AssertClean(t)
}

// TestPluginSlow stops the daemon in the middle of a create, for longer than
// CRI-O waits, or for less.
func TestPluginSlow(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "plugin/model:1", version("one"))
	annotations := map[string]string{serverKey: volumes(t, volume{Image: ref, MountPath: "/models"})[domain]}
	for _, tc := range []struct {
		name string
		stop time.Duration
		ok   bool
	}{
		{"within the time-out", nriTimeOut / 2, true},
		{"beyond the time-out", nriTimeOut + time.Second, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := runPod(t, n, realnode.PodSpec{Annotations: annotations})
			server := realnode.ContainerSpec{Name: "server"}
			require.NoError(t, create(t, pod, server).Remove(t.Context())) // so the image is there
			freeze(t, n)
			cont := time.AfterFunc(tc.stop, func() {
				assert.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGCONT))
			})
			defer cont.Stop()
			start := time.Now()
			if tc.ok {
				c := run(t, pod, server)
				assert.Equal(t, "one", sh(t, c, "cat /models/version"))
				assert.GreaterOrEqual(t, time.Since(start), tc.stop)
			} else {
				guardRefuses(t, n, pod, server)
				assert.GreaterOrEqual(t, time.Since(start), nriTimeOut)
				run(t, pod, realnode.ContainerSpec{Name: "other"})
				run(t, runPod(t, n, realnode.PodSpec{}), realnode.ContainerSpec{})
				require.Eventually(t, func() bool { return len(given(t, n)) == 0 }, 20*time.Second, 50*time.Millisecond,
					"what CRI-O gave up is not known as a container for long")
				recovers(t, pod, server)
			}
			awaitRegistered(t, n)
			assert.Len(t, given(t, n), 1)
			require.NoError(t, pod.Remove(t.Context()))
		})
	}
	n.AssertClean(t)
}

// TestGuardIsNotDeceived has a container from an image that has something at the
// volume's path already, which must not pass for the volume.
func TestGuardIsNotDeceived(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "plugin/model:1", version("one"))
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/models"})})
	require.NoError(t, create(t, pod, realnode.ContainerSpec{}).Remove(t.Context()))
	mounted, err := os.ReadDir(n.RunDir() + "/mounts")
	require.NoError(t, err)
	require.Len(t, mounted, 1)
	source := n.RunDir() + "/mounts/" + mounted[0].Name()

	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
	for name, layer := range map[string][]images.Entry{
		"directory with the same files":   {images.Dir("models", 0o755), images.File("models/version", "one", 0o644)},
		"link into the image":             {images.Dir("data", 0o755), images.File("data/version", "one", 0o644), images.Symlink("models", "/data")},
		"link to nowhere":                 {images.Symlink("models", "/nowhere")},
		"link to itself":                  {images.Symlink("models", "models")},
		"link out of the image":           {images.Symlink("models", "../../../.."+source)},
		"link to what the runtime mounts": {images.Symlink("models", "/dev/shm")},
		"link to another process's root":  {images.Symlink("models", "/proc/1/root")},
		"a file":                          {images.File("models", "one", 0o644)},
	} {
		t.Run(name, func(t *testing.T) {
			image := pushOnBase(t, n, "guard/"+strings.ReplaceAll(strings.ReplaceAll(name, " ", "-"), "'", "")+":1", layer)
			guardRefuses(t, n, pod, realnode.ContainerSpec{Image: image})
		})
	}
	t.Run("annotation that the daemon would write", func(t *testing.T) {
		guardRefuses(t, n, pod, realnode.ContainerSpec{Annotations: map[string]string{
			"ocihold.dev/volumes": `[{"mountPath": "/models", "image": "` + ref + `"}]`,
		}})
	})
	t.Run("bind mount of another directory", func(t *testing.T) {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(dir+"/version", []byte("one"), 0o644))
		guardRefuses(t, n, pod, realnode.ContainerSpec{Mounts: []*cri.Mount{{ContainerPath: "/models", HostPath: dir, Readonly: true}}})
	})
	t.Run("bind mount of the volume itself", func(t *testing.T) {
		spec := realnode.ContainerSpec{Mounts: []*cri.Mount{{ContainerPath: "/models", HostPath: source, Readonly: true}}}
		assert.Contains(t, refused(t, pod, spec, "ocihold-guard"), "requested by annotation "+domain+" but injected without nosuid: is ocihold running?")
	})
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	recovers(t, pod, realnode.ContainerSpec{})
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// TestGuardWithoutADaemon has a daemon that cannot start, as its configuration is
// broken: the guard refuses what has the annotation, and a faulty annotation by
// its fault; all else starts, and all is well with the configuration mended.
func TestGuardWithoutADaemon(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "plugin/model:1", version("one"))
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/models"})})
	require.NoError(t, create(t, pod, realnode.ContainerSpec{}).Remove(t.Context()))

	good, err := os.ReadFile(n.OciholdConf())
	require.NoError(t, err)
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	require.NoError(t, os.WriteFile(n.OciholdConf(), []byte(string(good)+"\n[volumes\n"), 0o644))
	require.Error(t, n.Start(t.Context(), realnode.Ocihold))
	guardRefuses(t, n, pod, realnode.ContainerSpec{})
	faulty := runPod(t, n, realnode.PodSpec{Annotations: map[string]string{serverKey: "- image: [\n"}})
	text := refused(t, faulty, realnode.ContainerSpec{Name: "server"}, "ocihold-guard: ")
	assert.Contains(t, text, "annotation "+serverKey+": is neither YAML nor JSON")
	run(t, faulty, realnode.ContainerSpec{Name: "other"})
	require.NoError(t, faulty.Remove(t.Context()))

	require.NoError(t, os.WriteFile(n.OciholdConf(), good, 0o644))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	recovers(t, pod, realnode.ContainerSpec{})
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// TestMountPathThatIsAnotherByALink has a volume at a link of the image, and a
// directory of the host where that leads. Which of them is on top is the
// runtime's order of mounts: a container without its volume does not start.
func TestMountPathThatIsAnotherByALink(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "plugin/model:1", version("one"))
	image := pushOnBase(t, n, "guard/link:1", []images.Entry{
		images.Dir("data", 0o755), images.Symlink("models", "/data"), images.Symlink("a", "/data"),
	})
	host := t.TempDir()
	require.NoError(t, os.WriteFile(host+"/version", []byte("host"), 0o644))
	started := map[bool]int{}
	for _, path := range []string{"/models", "/a", "/data"} {
		for _, other := range []string{"/models", "/a", "/data"} {
			if path == other {
				continue
			}
			pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: path})})
			require.NoError(t, create(t, pod, realnode.ContainerSpec{}).Remove(t.Context())) // so the image is there
			c, err := pod.Create(t.Context(), realnode.ContainerSpec{
				Image: image, Attempt: 1, Mounts: []*cri.Mount{{ContainerPath: other, HostPath: host, Readonly: true}},
			})
			started[err == nil]++
			if err != nil {
				assert.Contains(t, err.Error(), "ocihold-guard: image volume "+path+" of container main of pod ")
				assert.Contains(t, err.Error(), "but not mounted: ")
				continue
			}
			require.NoError(t, c.Start(t.Context()))
			assert.Equal(t, "one", sh(t, c, "cat "+path+"/version"))
		}
	}
	t.Log(started[true], "started,", started[false], "were refused")
	assert.Positive(t, started[false], "no other mount was on top")
}

// pushOnBase pushes an image of busybox with a layer on top, has CRI-O pull it
// and returns its full name.
func pushOnBase(t testing.TB, n *realnode.Node, ref string, layer []images.Entry) string {
	t.Helper()
	base, err := images.Busybox()
	require.NoError(t, err)
	top, err := images.Layer(layer...)
	require.NoError(t, err)
	image, err := mutate.AppendLayers(base, top)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), ref, image))
	_, err = n.Pull(t.Context(), n.Ref(ref))
	require.NoError(t, err)
	return n.Ref(ref)
}

// TestMountPaths mounts at every kind of path that an image can have.
func TestMountPaths(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "plugin/model:1", version("one"))
	file := images.File
	t.Run("paths", func(t *testing.T) {
		for _, tc := range []struct {
			name  string
			layer []images.Entry
			path  string
			at    string // where it is to be found as well
		}{
			{"nothing", nil, "/models", ""},
			{"nothing, deep", nil, "/a/b/c/d/e/f/g/h/models", ""},
			{"nothing, in a directory of the image", nil, "/usr/share/models", ""},
			{"nothing, with odd names", nil, "/a b/…/\\x/models,ro", ""},
			{"directory", []images.Entry{images.Dir("models", 0o700).Owned(7, 7), file("models/version", "hidden", 0o600)}, "/models", ""},
			{"deep directory", []images.Entry{file("a/b/c/version", "hidden", 0o600)}, "/a/b/c", ""},
			{"over a directory of the base", []images.Entry{file("usr/version", "hidden", 0o600)}, "/usr", ""},
			{"link", []images.Entry{images.Dir("data", 0o755), images.Symlink("models", "/data")}, "/models", "/data"},
			{"relative link", []images.Entry{images.Dir("srv/data", 0o755), images.Symlink("opt/models", "../srv/data")}, "/opt/models", "/srv/data"},
			{"link through links", []images.Entry{images.Dir("c", 0o755), images.Symlink("b", "c"), images.Symlink("models", "/b")}, "/models", "/c"},
			{"link to nowhere", []images.Entry{images.Symlink("models", "/no/where")}, "/models", "/no/where"},
			{"link out of the image", []images.Entry{images.Symlink("models", "../../../../out")}, "/models", "/out"},
			{"link in the way", []images.Entry{images.Dir("real", 0o755), images.Symlink("link", "/real")}, "/link/deep/models", "/real/deep/models"},
			{"link out of the image in the way", []images.Entry{images.Symlink("link", "/../..")}, "/link/models", "/models"},
		} {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: tc.path})})
				spec := realnode.ContainerSpec{}
				if tc.layer != nil {
					spec.Image = pushOnBase(t, n, "paths/"+strings.NewReplacer(" ", "-", ",", "").Replace(tc.name)+":1", tc.layer)
				}
				c := run(t, pod, spec)
				for _, path := range []string{tc.path, tc.at} {
					if path != "" {
						out, err := c.Exec(t.Context(), "/bin/cat", path+"/version")
						require.NoError(t, err)
						assert.Equal(t, realnode.Output{Stdout: "one"}, out)
					}
				}
			})
		}
	})
	n.AssertClean(t)
}
