package integration

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// writable is a volume that is not read-only, as an annotation has it.
type writable struct {
	volume

	ReadOnly    bool   `json:"readOnly"`
	Scratch     string `json:"scratch,omitempty"`
	ScratchSize string `json:"scratchSize,omitempty"`
}

// writables is the annotation key, of which ending is the end, with vs.
func writables(t testing.TB, ending string, vs ...writable) map[string]string {
	t.Helper()
	text, err := json.Marshal(vs)
	require.NoError(t, err)
	return map[string]string{"image-volume.ocihold.dev" + ending: string(text)}
}

// scratchImage is an image with some of what can be in the way of writing.
func scratchImage(t testing.TB, n *realnode.Node, ref string) string {
	t.Helper()
	return push(t, n, ref, []images.Entry{
		images.Dir(".", 0o775).Owned(1000, 1000),
		images.Dir("dir", 0o755),
		images.File("dir/kept", "of the image", 0o644),
		images.File("dir/deleted", "of the image", 0o644),
		images.Dir("gone", 0o755),
		images.File("gone/file", "of the image", 0o644),
		images.Big("big", 1<<20, 7),
	}, []images.Entry{images.File("top", "of the image", 0o600)})
}

// scratchFiles are the loop devices whose file is in the node's directory for
// what containers write, and what else is there.
func scratchFiles(t testing.TB, n *realnode.Node) []string {
	t.Helper()
	dir := filepath.Join(n.Dir(), "lib", "ocihold", "scratch")
	names, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	require.NoError(t, err)
	found := []string{}
	for _, name := range names {
		if file, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(file), dir+"/") {
			found = append(found, strings.TrimSpace(string(file)))
		}
	}
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, entry := range entries {
		found = append(found, entry.Name())
	}
	return found
}

// requireNoScratch waits until nothing is left of any volume.
func requireNoScratch(t testing.TB, n *realnode.Node) {
	t.Helper()
	requireNothingHeld(t, n)
	requireScratch(t, n, 0)
}

// requireScratch waits until there are so many files for what containers write.
func requireScratch(t testing.TB, n *realnode.Node, count int) {
	t.Helper()
	await(t, func() error {
		if files := scratchFiles(t, n); len(files) != count {
			return fmt.Errorf("%d files for scratch, not %d: %q", len(files), count, files)
		}
		return nil
	})
}

// restart does what kubelet does when a container has ended.
func restart(t testing.TB, pod *realnode.Pod, c *realnode.Container, spec realnode.ContainerSpec) *realnode.Container {
	t.Helper()
	require.NoError(t, c.Stop(t.Context()))
	spec.Attempt++
	next := run(t, pod, spec)
	require.NoError(t, c.Remove(t.Context()))
	return next
}

// layersTree is every file of layers in CRI-O's root.
func layersTree(t *testing.T, n *realnode.Node, ids []string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, id := range ids {
		for name, is := range tree(t, filepath.Join(n.CRIORoot(), "overlay", id, "diff")) {
			all[id+"/"+name] = is
		}
	}
	return all
}

// scribble changes all there is at /vol.
const scribble = `cd /vol; echo changed >> dir/kept; rm dir/deleted; rm -r gone; mv dir moved; echo new > new; chmod 0777 top; chown 5:6 big; mkdir -p a/b/c; echo x > a/b/c/x`

// What a container writes is its own, ends with it, and leaves the image as it
// was, to the last attribute.
func TestScratchOfAContainer(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/container:1")
	asked := writables(t, "/pod", writable{volume: volume{Image: ref, MountPath: "/vol"}})
	_, err := ociholdCommand(t, n, "pull", ref)
	require.NoError(t, err)
	ids := layers(t, n)
	reader := run(t, runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/vol"})}), realnode.ContainerSpec{})
	image, store := tree(t, rootOf(t, reader)+"/vol"), layersTree(t, n, ids)
	require.Contains(t, image["."], " 1000:1000")

	one := runPod(t, n, realnode.PodSpec{Annotations: asked})
	two := runPod(t, n, realnode.PodSpec{Annotations: asked})
	a, b := run(t, one, realnode.ContainerSpec{}), run(t, two, realnode.ContainerSpec{})
	other := run(t, one, realnode.ContainerSpec{Name: "other"})
	for _, c := range []*realnode.Container{a, b, other} {
		require.Equal(t, image, tree(t, rootOf(t, c)+"/vol"), "at first it is the image")
	}
	fields := strings.Fields(sh(t, a, "grep ' /vol ' /proc/self/mountinfo"))
	assert.Equal(t, "rw,nosuid,nodev,noexec,relatime", fields[5])

	sh(t, a, scribble)
	sh(t, b, "echo b > /vol/new")
	assert.Equal(t, "of the image\nchanged\n", strings.Replace(sh(t, a, "cat /vol/moved/kept"), "imagechanged", "image\nchanged", 1))
	assert.Equal(t, "b\n", sh(t, b, "cat /vol/new"))
	assert.Equal(t, image, tree(t, rootOf(t, other)+"/vol"), "another container of the pod")
	assert.Equal(t, image, tree(t, rootOf(t, reader)+"/vol"), "one that only reads")
	assert.Equal(t, store, layersTree(t, n, ids), "the layers of the image")

	a = restart(t, one, a, realnode.ContainerSpec{})
	assert.Equal(t, image, tree(t, rootOf(t, a)+"/vol"), "after a restart")
	assert.Equal(t, "b\n", sh(t, b, "cat /vol/new"))
	sh(t, a, scribble)

	for _, pod := range []*realnode.Pod{one, two} {
		require.NoError(t, pod.Remove(t.Context()))
	}
	requireScratch(t, n, 0)
	assert.Equal(t, store, layersTree(t, n, ids), "the layers of the image")
	assert.Equal(t, image, tree(t, rootOf(t, reader)+"/vol"))
}

// What a pod writes stays over restarts of its containers; those that have it by
// one list share it.
func TestScratchOfAPod(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/pod:1")
	v := writable{volume: volume{Image: ref, MountPath: "/vol", Exec: true}, Scratch: "pod"}
	asked := writables(t, "/pod", v)
	maps.Copy(asked, writables(t, "/container.own", v))
	pod := runPod(t, n, realnode.PodSpec{Annotations: asked})
	a := run(t, pod, realnode.ContainerSpec{Name: "a"})
	sh(t, a, scribble)
	written := tree(t, rootOf(t, a)+"/vol")
	b := run(t, pod, realnode.ContainerSpec{Name: "b"})
	assert.Equal(t, written, tree(t, rootOf(t, b)+"/vol"), "shared by list")
	assert.NoError(t, unix.Access(rootOf(t, b)+"/vol/moved", unix.X_OK))
	own := run(t, pod, realnode.ContainerSpec{Name: "own"})
	assert.Equal(t, "of the image", sh(t, own, "cat /vol/dir/deleted"), "by its own list it has its own")
	sh(t, own, "echo own > /vol/new")

	sh(t, b, "echo b >> /vol/new")
	a = restart(t, pod, a, realnode.ContainerSpec{Name: "a"})
	assert.Equal(t, "new\nb\n", sh(t, a, "cat /vol/new"))
	own = restart(t, pod, own, realnode.ContainerSpec{Name: "own"})
	assert.Equal(t, "own\n", sh(t, own, "cat /vol/new"))
	require.NoError(t, b.Remove(t.Context()))
	require.NoError(t, a.Remove(t.Context()))
	a = run(t, pod, realnode.ContainerSpec{Name: "a", Attempt: 2})
	assert.Equal(t, "new\nb\n", sh(t, a, "cat /vol/new"), "with no container meanwhile")

	next := runPod(t, n, realnode.PodSpec{Name: pod.Config.GetMetadata().GetName() + "-2", Annotations: asked})
	assert.Equal(t, "of the image", sh(t, run(t, next, realnode.ContainerSpec{Name: "a"}), "cat /vol/dir/deleted"), "another pod")
	require.NoError(t, pod.Remove(t.Context()))
	require.NoError(t, next.Remove(t.Context()))
	requireNoScratch(t, n)
}

// Several images, and parts of them, can lie below what is written.
func TestScratchOverParts(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/parts:1")
	over := push(t, n, "scratch/over:1", []images.Entry{images.File("kept", "of the other", 0o644)})
	pod := runPod(t, n, realnode.PodSpec{Annotations: map[string]string{
		"image-volume.ocihold.dev/container.both": `[{images: [{image: "` + ref + `", subPath: dir}, {image: "` + over + `"}], mountPath: /vol, readOnly: false}]`,
		"image-volume.ocihold.dev/container.dir":  `[{image: "` + ref + `", subPath: dir, mountPath: /vol, readOnly: false}]`,
		"image-volume.ocihold.dev/container.file": `[{image: "` + ref + `", subPath: dir/kept, mountPath: /vol, readOnly: false}]`,
	}})
	for name, want := range map[string]string{"both": "of the other", "dir": "of the image"} {
		c := run(t, pod, realnode.ContainerSpec{Name: name})
		assert.Equal(t, want+"\n+", sh(t, c, "cd /vol; rm deleted; echo >> kept; echo -n + >> kept; cat kept"))
		c = restart(t, pod, c, realnode.ContainerSpec{Name: name})
		assert.Equal(t, want+"of the image", sh(t, c, "cat /vol/kept /vol/deleted"))
	}
	text := refused(t, pod, realnode.ContainerSpec{Name: "file"}, "not a directory")
	assert.Contains(t, text, "ImageVolumeMountFailed: image volume /vol: ")
	require.NoError(t, pod.Remove(t.Context()))
	requireNoScratch(t, n)
}

// A container that writes to the bound gets ENOSPC, and nobody else notices.
func TestScratchIsBounded(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/bound:1")
	asked := writables(t, "", writable{volume: volume{Image: ref, MountPath: "/vol"}, ScratchSize: "32MiB"})
	pod := runPod(t, n, realnode.PodSpec{Annotations: asked})
	c, other := run(t, pod, realnode.ContainerSpec{}), run(t, pod, realnode.ContainerSpec{Name: "other"})

	out, err := c.Exec(t.Context(), "/bin/sh", "-c", "dd if=/dev/zero of=/vol/fill bs=1M count=100")
	require.NoError(t, err)
	require.NotZero(t, out.ExitCode)
	require.Contains(t, out.Stderr, "No space left on device")
	info, err := os.Stat(rootOf(t, c) + "/vol/fill")
	require.NoError(t, err)
	assert.Greater(t, info.Size(), int64(28<<20))
	assert.Less(t, info.Size(), int64(32<<20))
	sh(t, other, "dd if=/dev/zero of=/vol/some bs=1M count=20")

	used := scratchUse(t, n)
	assert.GreaterOrEqual(t, used.Bytes, uint64(info.Size()+20<<20))
	assert.Less(t, used.Bytes, uint64(64<<20))
	assert.Len(t, scratchFiles(t, n), used.Volumes)
	assert.LessOrEqual(t, used.PromisedBytes, uint64(used.Volumes)*32<<20)
	assert.Greater(t, used.PromisedBytes, uint64(used.Volumes)*28<<20)
	sh(t, c, "rm /vol/fill; sync")
	await(t, func() error {
		if now := scratchUse(t, n).Bytes; now > used.Bytes-28<<20 {
			return fmt.Errorf("%d bytes, %d with what was deleted", now, used.Bytes)
		}
		return nil
	})
	table, err := ociholdCommand(t, n, "df")
	require.NoError(t, err)
	assert.Regexp(t, `(?m)^SCRATCH `, table)

	require.NoError(t, pod.Remove(t.Context()))
	requireNoScratch(t, n)
	assert.Zero(t, scratchUse(t, n).Volumes)
}

type scratchUsage struct {
	Volumes       int
	Bytes         uint64
	PromisedBytes uint64 `json:"promised_bytes"`
}

// scratchUse is what ocihold df tells.
func scratchUse(t testing.TB, n *realnode.Node) scratchUsage {
	t.Helper()
	out, err := ociholdCommand(t, n, "df", "-o", "json")
	require.NoError(t, err)
	var use struct{ Scratch scratchUsage }
	require.NoError(t, json.Unmarshal([]byte(out), &use), out)
	return use.Scratch
}

// More than the disk has is refused, and said.
func TestScratchThatDoesNotFit(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/large:1")
	asked := writables(t, "/container.main", writable{volume: volume{Image: ref, MountPath: "/vol"}, ScratchSize: "8TiB"})
	pod := runPod(t, n, realnode.PodSpec{Annotations: asked})
	text := refused(t, pod, realnode.ContainerSpec{}, "not enough room on the disk")
	assert.Contains(t, text, "image volume /vol: ")
	assert.Contains(t, text, "8TiB of scratch is asked for and "+filepath.Join(n.Dir(), "lib", "ocihold", "scratch")+" has ")
	run(t, pod, realnode.ContainerSpec{Name: "other"})
	require.NoError(t, pod.Remove(t.Context()))
	requireNoScratch(t, n)
}

// More than the node allows is refused before anything is pulled; room that a pod
// has stays.
func TestScratchNotAllowed(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/limited:1")
	podWith := func(size string) *realnode.Pod {
		asked := writables(t, "/pod", writable{volume: volume{Image: ref, MountPath: "/vol"}, Scratch: "pod", ScratchSize: size})
		return runPod(t, n, realnode.PodSpec{Annotations: asked})
	}
	running := podWith("64MiB")
	sh(t, run(t, running, realnode.ContainerSpec{}), "echo kept >/vol/new")
	restartWith(t, n, "[volumes]\nmax_scratch_bytes = \"32MiB\"\n")

	require.NoError(t, n.Proxy().ResetCounts(t.Context()))
	pod := podWith("33MiB")
	text := refused(t, pod, realnode.ContainerSpec{}, "max_scratch_bytes in [volumes]")
	assert.Contains(t, text, "image volume /vol of container main of pod default/"+pod.Config.GetMetadata().GetName()+
		": annotation image-volume.ocihold.dev/pod: not allowed on this node: scratchSize is 33MiB and "+
		"max_scratch_bytes in [volumes] 32MiB: ask for less, or have the node allow more")
	assert.Empty(t, requests(t, n))
	require.NoError(t, pod.Remove(t.Context()))

	sh(t, run(t, podWith("32MiB"), realnode.ContainerSpec{}), "echo new >/vol/new")
	assert.Equal(t, "kept\n", sh(t, run(t, running, realnode.ContainerSpec{Name: "second"}), "cat /vol/new"))
}

// Programs that end and start again change nothing of what is written.
func TestScratchOverRestarts(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/restarts:1")
	asked := writables(t, "/container.pod", writable{volume: volume{Image: ref, MountPath: "/vol"}, Scratch: "pod"})
	maps.Copy(asked, writables(t, "/container.own", writable{volume: volume{Image: ref, MountPath: "/vol"}}))
	pod := runPod(t, n, realnode.PodSpec{Annotations: asked})
	spec := []realnode.ContainerSpec{{Name: "pod"}, {Name: "own"}}
	c := []*realnode.Container{run(t, pod, spec[0]), run(t, pod, spec[1])}
	for i := range c {
		sh(t, c[i], "echo -n > /vol/log")
	}
	want := ""
	for i, names := range [][]string{
		{realnode.Ocihold}, {realnode.CRIO}, {realnode.CRIO, realnode.Ocihold}, {realnode.Ocihold, realnode.CRIO},
	} {
		for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
			for _, name := range names {
				require.NoError(t, n.Kill(t.Context(), name, sig))
			}
			for _, name := range []string{realnode.CRIO, realnode.Ocihold} {
				if slices.Contains(names, name) {
					require.NoError(t, n.Start(t.Context(), name))
				}
			}
			awaitRegistered(t, n)
			line := fmt.Sprintf("%d %s\n", i, sig)
			want += line
			for _, c := range c {
				sh(t, c, "echo '"+strings.TrimSpace(line)+"' >> /vol/log")
				require.Equal(t, want, sh(t, c, "cat /vol/log"))
			}
			requireScratch(t, n, 2)
		}
	}
	for i := range c {
		c[i] = restart(t, pod, c[i], spec[i])
	}
	require.Equal(t, want, sh(t, c[0], "cat /vol/log"))
	require.Equal(t, "of the image", sh(t, c[1], "test ! -e /vol/log; cat /vol/dir/kept"))

	// No container runs, and ocihold does not know what there was.
	for _, c := range c {
		require.NoError(t, c.Remove(t.Context()))
	}
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	awaitRegistered(t, n)
	for i := range c {
		spec[i].Attempt = 2
		c[i] = run(t, pod, spec[i])
	}
	require.Equal(t, want, sh(t, c[0], "cat /vol/log"))
	require.Equal(t, "of the image", sh(t, c[1], "test ! -e /vol/log; cat /vol/dir/kept"))
	requireScratch(t, n, 2)

	// The pod goes while ocihold is away.
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
	require.NoError(t, pod.Remove(t.Context()))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	requireNoScratch(t, n)
}

// Whatever ocihold is about when it is killed, no room for scratch stays, and no
// container gets what another has written.
func TestScratchKilledAtWork(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/killed:1")
	spec := realnode.PodSpec{Annotations: writables(t, "", writable{volume: volume{Image: ref, MountPath: "/vol"}})}
	kept := runPod(t, n, spec)
	keeper := run(t, kept, realnode.ContainerSpec{})
	sh(t, keeper, "echo keeper > /vol/mark")
	requireScratch(t, n, 2)
	random := seeded(t)
	for range count(6, 100) {
		delay := time.Duration(random.IntN(int(400 * time.Millisecond)))
		killed := killAfter(t, n, delay)
		pod, err := n.RunPod(t.Context(), spec)
		attempt := uint32(0)
		for ; err == nil && len(killed) == 0; attempt++ {
			if c, refused := pod.Run(t.Context(), realnode.ContainerSpec{Attempt: attempt}); refused == nil {
				sh(t, c, "test ! -e /vol/mark; echo > /vol/mark")
			}
			time.Sleep(20 * time.Millisecond)
		}
		require.NoError(t, <-killed)
		awaitRegistered(t, n)
		if pod == nil {
			pod, err = n.RunPod(t.Context(), spec)
			require.NoError(t, err)
		}
		sh(t, run(t, pod, realnode.ContainerSpec{Attempt: attempt}), "test ! -e /vol/mark; echo > /vol/mark")
		removeOtherPods(t, n, kept)
		requireScratch(t, n, 2)
		require.Equal(t, "keeper\n", sh(t, keeper, "cat /vol/mark"))
	}
	require.NoError(t, kept.Remove(t.Context()))
	requireNoScratch(t, n)
	n.AssertClean(t)
}

// A reboot ends what is written.
func TestScratchOverAReboot(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/reboot:1")
	asked := writables(t, "", writable{volume: volume{Image: ref, MountPath: "/vol"}, Scratch: "pod"})
	for range 2 {
		pod, err := n.RunPod(t.Context(), realnode.PodSpec{Annotations: asked})
		require.NoError(t, err)
		sh(t, run(t, pod, realnode.ContainerSpec{}), "test ! -e /vol/new; echo new > /vol/new")
		requireScratch(t, n, 1)
		require.NoError(t, n.Reboot(t.Context()))
		requireNoScratch(t, n)
	}
	n.AssertClean(t)
}

// As long as a process has a volume, what was written stays, whatever CRI-O and
// ocihold know of it.
func TestScratchOfAProcess(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := scratchImage(t, n, "scratch/process:1")
	pod := runPod(t, n, realnode.PodSpec{Annotations: writables(t, "", writable{volume: volume{Image: ref, MountPath: "/vol"}, Scratch: "pod"})})
	c := run(t, pod, realnode.ContainerSpec{})
	sh(t, c, "echo kept > /vol/new")
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	process := exec.CommandContext(t.Context(), "nsenter", "--target", fmt.Sprint(info.PID), "--mount", "/bin/sh", "-c", "echo ready; read line; cat /vol/new")
	in, err := process.StdinPipe()
	require.NoError(t, err)
	out, err := process.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, process.Start())
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)

	require.NoError(t, pod.Remove(t.Context()))
	passing := pushFiles(t, n, "passing:1", 1, 1)
	other := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: passing.ref, MountPath: "/vol"})})
	create(t, other, realnode.ContainerSpec{})
	require.NoError(t, other.Remove(t.Context()))
	await(t, func() error { // ocihold has compared what it holds with what is needed
		h, err := heldBy(n)
		if err == nil && slices.Contains(h.Leases, passing.id) {
			err = errors.New("the passing image is still held")
		}
		return err
	})
	requireScratch(t, n, 1)
	require.Equal(t, 1, scratchUse(t, n).Volumes, "it is still mounted")
	_, err = in.Write([]byte("\n"))
	require.NoError(t, err)
	line, err = lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "kept\n", line)
	require.NoError(t, process.Wait())
	requireNoScratch(t, n)
}

// Who writes to a disk that is full is told; the next are refused until there is
// space; all else goes on.
func TestScratchOnAFullDisk(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			d := newDiskAt(t, kind, filepath.Join("lib", "ocihold"))
			n := realnode.Boot(t, realnode.Options{Dir: d.node})
			ref := scratchImage(t, n, "scratch/full:1")
			spec := realnode.PodSpec{Annotations: writables(t, "/container.main",
				writable{volume: volume{Image: ref, MountPath: "/vol"}, ScratchSize: "64MiB"})}
			pod := runPod(t, n, spec)
			c := run(t, pod, realnode.ContainerSpec{})
			sh(t, c, "dd if=/dev/zero of=/vol/before bs=1M count=4 conv=fsync")
			filler := fill(t, d.point, 1<<20)

			next := runPod(t, n, spec)
			refused(t, next, realnode.ContainerSpec{}, "not enough room on the disk")
			out, err := c.Exec(t.Context(), "/bin/sh", "-c", "dd if=/dev/zero of=/vol/over bs=1M count=40 conv=fsync")
			require.NoError(t, err)
			assert.NotZero(t, out.ExitCode, "%s%s", out.Stdout, out.Stderr)
			assert.Equal(t, "of the image", sh(t, c, "cat /vol/dir/deleted"))
			_, err = ociholdCommand(t, n, "status")
			require.NoError(t, err)

			require.NoError(t, os.Remove(filler))
			sh(t, run(t, next, realnode.ContainerSpec{}), "dd if=/dev/zero of=/vol/over bs=1M count=40 conv=fsync")
			require.NoError(t, next.Remove(t.Context()))
			require.NoError(t, pod.Remove(t.Context()))
			requireNoScratch(t, n)
			require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM)) // it has its directory on the disk
		})
	}
}
