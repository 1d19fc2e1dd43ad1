package storage

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"
)

const collected = 100 << 10 // bytes of a layer in these tests

// pullSized pulls an image with a layer of that many bytes for each seed into vm, last used that long ago.
func (n *testNode) pullSized(t *testing.T, reg *testRegistry, name string, unused time.Duration, seeds ...uint64) Image {
	t.Helper()
	reg.push(t, name, imageOf(t, sized(seeds...)...))
	image := n.pull(t, "vm", reg.host+"/"+name)
	n.age(t, image.ID, unused)
	return image
}

// sized are contents that do not compress.
func sized(seeds ...uint64) []string {
	contents := make([]string, len(seeds))
	for i, seed := range seeds {
		content := make([]byte, collected)
		random := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
		_, _ = random.Read(content)
		contents[i] = string(content)
	}
	return contents
}

// age makes the image last used that long ago.
func (n *testNode) age(t *testing.T, id string, unused time.Duration) {
	t.Helper()
	require.NoError(t, n.root(t, "vm").setUsed(id, time.Now().Add(-unused)))
}

func (n *testNode) collect(t *testing.T, opt CollectOptions) map[string]GCImage {
	t.Helper()
	c, err := n.roots.Collect(t.Context(), "vm", opt)
	require.NoError(t, err)
	assert.Empty(t, c.Faults)
	return byID(c)
}

func byID(c Collection) map[string]GCImage {
	images := make(map[string]GCImage)
	for _, image := range c.Images {
		images[image.ID] = image
	}
	return images
}

func (n *testNode) has(t *testing.T, id string) bool {
	t.Helper()
	_, err := n.root(t, "vm").Resolve(t.Context(), id)
	if !errors.Is(err, ErrNotFound) {
		require.NoError(t, err)
	}
	return err == nil
}

// all asks for everything to go that may.
func all() CollectOptions {
	return CollectOptions{GCPolicy: GCPolicy{High: 1, Low: 0, MaxBytes: 1, MinAge: time.Minute}}
}

func TestCollect(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm", "wasm")
	root := node.root(t, "vm")
	leased := node.pullSized(t, reg, "leased:1", 9*time.Hour, 1)
	require.NoError(t, root.Lease(t.Context(), leased.ID))
	running := node.pullSized(t, reg, "running:1", 9*time.Hour, 2)
	require.NoError(t, node.crio("create", running.ID, "c1"))
	own := node.pullSized(t, reg, "own:1", 9*time.Hour, 3)
	_, err := root.store.CreateContainer("", []string{"podmans"}, own.ID, "", "{}", nil)
	require.NoError(t, err)
	pinned := node.pullSized(t, reg, "pinned:1", 9*time.Hour, 4)
	used := node.pullSized(t, reg, "used:1", 9*time.Hour, 5)
	whole := node.pullSized(t, reg, "whole:1", 9*time.Hour, 6, 7)
	part := node.pullSized(t, reg, "part:1", 9*time.Hour, 8, 9)
	reg.push(t, "leans:1", imageOf(t, sized(6, 7, 10)...))
	reg.push(t, "leans:2", imageOf(t, sized(8, 11)...))
	for _, tag := range []string{"1", "2"} { // CRI-O stores the last layer only
		require.NoError(t, node.crio("pull", reg.host+"/leans:"+tag))
	}
	young := node.pullSized(t, reg, "young:1", 30*time.Second, 12)
	older := node.pullSized(t, reg, "older:1", 3*time.Hour, 13)
	newer := node.pullSized(t, reg, "newer:1", 2*time.Hour, 14)
	bad := node.pullSized(t, reg, "bad:1", 9*time.Hour, 15)
	require.NoError(t, root.store.SetNames(bad.ID, []string{"localhost/no-tag"}))
	for _, id := range []string{leased.ID, running.ID, own.ID} {
		node.age(t, id, 9*time.Hour)
	}

	asked := 0
	opt := all()
	opt.Pinned = func(image Image) bool { return image.ID == pinned.ID }
	opt.Users = func(context.Context) (func(string) ([]string, error), error) {
		asked++
		return func(id string) ([]string, error) {
			if id == used.ID {
				return []string{"container of a test"}, nil
			}
			return nil, nil
		}, nil
	}
	opt.DryRun = true
	layers := layerIDs(t, root)
	dry, err := node.roots.Collect(t.Context(), "vm", opt)
	require.NoError(t, err)
	assert.Equal(t, dry.Before, dry.After)
	assert.Equal(t, layers, layerIDs(t, root))

	opt.DryRun = false
	got, err := node.roots.Collect(t.Context(), "vm", opt)
	require.NoError(t, err)
	assert.Equal(t, 2, asked, "once each")
	images := byID(got)
	for id, want := range map[string]string{
		leased.ID: "leased for a volume", running.ID: "image in use by container k8s_c1",
		own.ID: "image in use by container podmans of the root", pinned.ID: "pinned",
		used.ID: "image in use by container of a test", whole.ID: "CRI-O's root needs its layers",
		young.ID: "used within gc_min_age, About a minute",
	} {
		assert.Equal(t, want, images[id].Why)
		assert.False(t, images[id].Goes)
		assert.True(t, node.has(t, id), want)
	}
	for _, image := range []Image{part, older, newer} {
		assert.True(t, images[image.ID].Goes, image.Names)
		assert.InDelta(t, collected, images[image.ID].Frees, 40<<10, image.Names)
		assert.False(t, node.has(t, image.ID), image.Names)
		assert.Equal(t, images[image.ID].Frees, byID(dry)[image.ID].Frees)
	}
	assert.Equal(t, []string{part.ID, older.ID, newer.ID}, []string{got.Images[0].ID, got.Images[1].ID, got.Images[2].ID})
	assert.Equal(t, dry.Freed, got.Freed)
	assert.InDelta(t, got.Before-got.After, got.Freed, 80<<10)
	require.Len(t, got.Faults, 1)
	assert.Contains(t, got.Faults[0], bad.ID)
	assert.Contains(t, got.Faults[0], "localhost/no-tag")
	layer, err := root.store.Image(bad.ID)
	require.NoError(t, err)
	assert.True(t, root.store.Exists(layer.TopLayer), "what is not understood stays")
	require.NoError(t, root.store.SetNames(bad.ID, []string{"localhost/no:tag"}))
	require.NoError(t, node.crio("check"))

	// What has ended ends the stay, when it is old enough.
	require.NoError(t, root.Release(t.Context(), leased.ID))
	require.NoError(t, node.crio("delete", "c1"))
	images = node.collect(t, opt)
	assert.Equal(t, "used within gc_min_age, About a minute", images[leased.ID].Why, "it was used when it was looked at last")
	assert.Equal(t, "used within gc_min_age, About a minute", images[running.ID].Why)
	for _, id := range []string{leased.ID, running.ID} {
		node.age(t, id, time.Hour)
	}
	images = node.collect(t, opt)
	assert.True(t, images[leased.ID].Goes)
	assert.True(t, images[running.ID].Goes)
	require.NoError(t, node.crio("check"))
}

func TestCollectBetweenMarks(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm")
	var ids []string
	for i := range uint64(6) {
		ids = append(ids, node.pullSized(t, reg, fmt.Sprint("a:", i), time.Duration(10-i)*time.Hour, i).ID)
	}
	usage, err := node.root(t, "vm").Usage(t.Context())
	require.NoError(t, err)
	limit := func(high int) CollectOptions {
		return CollectOptions{GCPolicy: GCPolicy{High: high, Low: 60, MaxBytes: int64(usage.Bytes)}}
	}
	for id, image := range node.collect(t, limit(100)) {
		assert.False(t, image.Goes, id)
	}
	images := node.collect(t, limit(99))
	for i, id := range ids {
		assert.Equal(t, i < 3, images[id].Goes, "%d of 6 are too many: %s", i, images[id].Why)
		assert.Equal(t, i >= 3, node.has(t, id))
	}
	for id, image := range node.collect(t, limit(99)) {
		assert.False(t, image.Goes, id)
	}

	// Without a limit of its own, a root on CRI-O's disk is kubelet's, but for age.
	c, err := node.roots.Collect(t.Context(), "vm", CollectOptions{GCPolicy: GCPolicy{High: 1, MaxAge: 6*time.Hour + time.Minute}})
	require.NoError(t, err)
	assert.Zero(t, c.Capacity)
	assert.Equal(t, []bool{true, false, false}, []bool{c.Images[0].Goes, c.Images[1].Goes, c.Images[2].Goes})
	assert.Equal(t, ids[3], c.Images[0].ID)
}

func TestCollectRefuses(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm")
	image := node.pullSized(t, reg, "a:1", time.Hour, 1)
	down := errors.New("CRI-O is down")
	opt := all()
	opt.Users = func(context.Context) (func(string) ([]string, error), error) { return nil, down }
	_, err := node.roots.Collect(t.Context(), "vm", opt)
	require.ErrorIs(t, err, down)
	assert.True(t, node.has(t, image.ID))
	_, err = node.roots.Collect(t.Context(), "", opt)
	require.ErrorIs(t, err, errKubelets)
	_, err = node.roots.Collect(t.Context(), "none", opt)
	require.ErrorIs(t, err, ErrUnknownHandler)

	// What begins between the choice and the removal is seen.
	for name, begin := range map[string]func() error{
		"a use":       func() error { return node.root(t, "vm").MarkUsed(t.Context(), image.ID) },
		"a lease":     func() error { return node.root(t, "vm").Lease(t.Context(), image.ID) },
		"a container": func() error { return node.crio("create", image.ID, "c1") },
		"a pull": func() error {
			_, err := node.root(t, "vm").Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			node.age(t, image.ID, time.Hour)
			opt := all()
			opt.Users = func(context.Context) (func(string) ([]string, error), error) {
				return func(string) ([]string, error) { return nil, begin() }, nil
			}
			got := node.collect(t, opt)
			assert.False(t, got[image.ID].Goes, got[image.ID].Why)
			assert.True(t, node.has(t, image.ID))
			require.NoError(t, node.root(t, "vm").Release(t.Context(), image.ID))
			_ = node.crio("delete", "c1")
		})
	}
}

// A second pull of the same pod may take longer than gc_min_age.
func TestCollectDuringLongPull(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm", "wasm")
	first := node.pullSized(t, reg, "first:1", 0, 1)
	old := node.pullSized(t, reg, "old:1", 3*time.Hour, 2)
	reg.push(t, "second:1", imageOf(t, "second"))
	arrived, goOn := reg.stallFirst()
	pulled, wasm := make(chan error, 1), node.root(t, "wasm")
	go func() {
		_, err := wasm.Pull(t.Context(), reg.host+"/second:1", PullOptions{})
		pulled <- err
	}()
	<-arrived
	node.root(t, "vm").now = func() time.Time { return time.Now().Add(time.Hour) }
	images := node.collect(t, all())
	assert.Equal(t, "its pod may wait for a pull, or just have done so", images[first.ID].Why)
	assert.True(t, images[old.ID].Goes)
	close(goOn)
	require.NoError(t, <-pulled)
	require.True(t, node.collect(t, all())[first.ID].Goes, "then it is too old")

	// After its end the pod may be about to use what it has.
	node.root(t, "vm").now = time.Now
	again := node.pullSized(t, reg, "first:1", 10*time.Minute, 1)
	now := time.Now()
	wasm.pulls.ended = []span{{now.Add(-10*time.Minute + 30*time.Second), now.Add(-30 * time.Second)}}
	assert.Equal(t, "its pod may wait for a pull, or just have done so", node.collect(t, all())[again.ID].Why)
	wasm.pulls.ended[0].ended = now.Add(-2 * time.Minute)
	assert.True(t, node.collect(t, all())[again.ID].Goes)
}

func TestCollectRests(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm")
	root := node.root(t, "vm")
	image := node.pullSized(t, reg, "a:1", 0, 1)
	record, err := root.store.Image(image.ID)
	require.NoError(t, err)
	layer := func(parent string, names ...string) string {
		l, err := root.store.CreateLayer("", parent, names, "", false, hostMapped())
		require.NoError(t, err)
		return l.ID
	}
	onImage := layer(record.TopLayer)
	lower := layer("")
	upper := layer(lower)
	named := layer("", "somebody's")
	belowNamed := layer("")
	layer(belowNamed, "another's")
	dead := filepath.Join(node.handlers[0].TempDir, tempPrefix+"1")
	require.NoError(t, os.MkdirAll(dead, 0o700))
	write(t, filepath.Join(dead, "blob"), string(make([]byte, collected)))

	collect := func(dry bool) Collection {
		opt := all()
		opt.DryRun, opt.High = dry, 100
		opt.MaxBytes = 0
		c, err := node.roots.Collect(t.Context(), "vm", opt)
		require.NoError(t, err)
		assert.Empty(t, c.Faults)
		return c
	}
	before := layerIDs(t, root)
	c := collect(false)
	assert.Empty(t, c.Layers, "another program may be pulling")
	assert.Equal(t, before, layerIDs(t, root))
	assert.InDelta(t, collected, c.Blobs, 16<<10)
	assert.NoDirExists(t, dead)

	root.now = func() time.Time { return time.Now().Add(restAge + time.Minute) }
	require.NoError(t, os.MkdirAll(dead, 0o700))
	dry := collect(true)
	assert.Equal(t, before, layerIDs(t, root))
	assert.DirExists(t, dead)
	c = collect(false)
	assert.Equal(t, dry.Layers, c.Layers)
	var gone []string
	for _, l := range c.Layers {
		gone = append(gone, l.ID)
	}
	assert.ElementsMatch(t, []string{onImage, lower, upper}, gone)
	left := layerIDs(t, root)
	for _, id := range gone {
		assert.NotContains(t, left, id)
	}
	assert.Subset(t, left, []string{record.TopLayer, named, belowNamed})
	assert.Len(t, left, len(before)-3)

	// Of an incomplete pull the next one takes up what is there.
	rests := layer("")
	reg.push(t, "b:1", imageOf(t, "b"))
	arrived, goOn := reg.stallFirst()
	pulled := make(chan error, 1)
	go func() {
		_, err := root.Pull(t.Context(), reg.host+"/b:1", PullOptions{})
		pulled <- err
	}()
	<-arrived
	assert.Empty(t, collect(false).Layers)
	close(goOn)
	require.NoError(t, <-pulled)
	c = collect(false)
	assert.Equal(t, []string{rests}, []string{c.Layers[0].ID})
}

// The data of an image whose record a killed removal has taken goes, too, unless the list of records is lost.
func TestCollectDataWithoutRecord(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm")
	root := node.root(t, "vm")
	image := node.pullSized(t, reg, "a:1", 0, 1)
	home := filepath.Join(root.store.GraphRoot(), "overlay-images")
	stray := filepath.Join(home, strings.Repeat("a", 64))
	require.NoError(t, os.Mkdir(stray, 0o700))
	write(t, filepath.Join(stray, "=key"), "data")
	other := filepath.Join(home, "other")
	require.NoError(t, os.Mkdir(other, 0o700))
	collect := func(dry bool) {
		opt := all()
		opt.DryRun, opt.High, opt.MaxBytes = dry, 100, 0
		c, err := node.roots.Collect(t.Context(), "vm", opt)
		require.NoError(t, err)
		assert.Empty(t, c.Faults)
	}
	collect(false)
	assert.DirExists(t, stray, "another program may be at it")
	root.now = func() time.Time { return time.Now().Add(restAge + time.Minute) }
	collect(true)
	assert.DirExists(t, stray)

	list := filepath.Join(home, "images.json")
	content, err := os.ReadFile(list)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(list, nil, 0o600))
	require.ErrorIs(t, root.collectData(nil), ErrEmptyList)
	assert.DirExists(t, filepath.Join(home, image.ID))
	require.NoError(t, os.WriteFile(list, content, 0o600))

	collect(false)
	assert.NoDirExists(t, stray)
	assert.DirExists(t, other)
	assert.DirExists(t, filepath.Join(home, image.ID))
}

func TestLastUsed(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm")
	root := node.root(t, "vm")
	ref := reg.host + "/a:1"
	image := node.pullSized(t, reg, "a:1", 0, 1)
	used := func() time.Time {
		at, err := root.lastUsed(image.ID)
		require.NoError(t, err)
		return at
	}
	old := time.Now().Add(-time.Hour).Truncate(time.Microsecond)
	reset := func() { require.NoError(t, root.setUsed(image.ID, old)) }

	reset()
	require.NoError(t, node.roots.Close())
	node.roots = openRoots(t, node.base, node.handlers)
	root = node.root(t, "vm")
	assert.True(t, used().Equal(old), "it outlives a restart")
	node.pull(t, "vm", ref)
	assert.Greater(t, used(), old.Add(30*time.Minute), "a pull of what is there")
	reset()
	require.NoError(t, root.MarkUsed(t.Context(), image.ID))
	assert.Greater(t, used(), old.Add(30*time.Minute))
	require.NoError(t, root.setUsed(image.ID, time.Now().Add(time.Hour)))
	assert.WithinDuration(t, time.Now(), used(), time.Minute, "a clock that was wrong is no reason to stay for ever")
	root.now = func() time.Time { return time.Now().Add(24 * time.Hour) }
	assert.WithinDuration(t, time.Now(), used(), time.Minute)

	require.ErrorIs(t, root.MarkUsed(t.Context(), imageID(t, imageOf(t, "none"))), ErrNotFound)
	require.ErrorIs(t, root.MarkUsed(t.Context(), "../x"), ErrInvalidReference)
	_, err := root.store.DeleteImage(image.ID, true)
	require.NoError(t, err)
	require.ErrorIs(t, root.MarkUsed(t.Context(), image.ID), ErrNotFound, "it goes with the image")
}

// A pull is told of when it is over: what it brought may be collected then.
func TestPulled(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm", "wasm")
	vm, err := node.roots.Pulled("vm")
	require.NoError(t, err)
	wasm, err := node.roots.Pulled("wasm")
	require.NoError(t, err)
	for i := range uint64(2) {
		node.pullSized(t, reg, fmt.Sprint("a:", i), 0, i)
	}
	assert.Len(t, vm, 1)
	assert.Empty(t, wasm)
	<-vm
	reg.push(t, "b:1", imageOf(t, "b"))
	pulled := make(chan Image, 1)
	root := node.root(t, "vm")
	go func() {
		image, err := root.Pull(t.Context(), reg.host+"/b:1", PullOptions{})
		assert.NoError(t, err)
		pulled <- image
	}()
	<-vm
	opt := all()
	opt.MinAge = 0
	c, err := node.roots.Collect(t.Context(), "vm", opt)
	require.NoError(t, err)
	assert.True(t, byID(c)[(<-pulled).ID].Goes)
	_, err = node.roots.Pulled("none")
	require.ErrorIs(t, err, ErrUnknownHandler)
}

// Of several layers, children come before their parents.
func TestRestsInOrder(t *testing.T) {
	root := &Root{now: time.Now}
	rests := root.rests(cstorage.MultiListResult{Layers: []cstorage.Layer{{ID: "a"}, {ID: "b", Parent: "a"}, {ID: "c", Parent: "b"}, {ID: "d"}}})
	assert.Equal(t, []string{"c", "b"}, rests[:2])
	slices.Sort(rests)
	assert.Equal(t, []string{"a", "b", "c", "d"}, rests)
}

// A disk that does not answer holds up its own root only.
func TestCollectBesideHungRoot(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm", "hung")
	image := node.pullSized(t, reg, "a:1", time.Hour, 1)
	marker := filepath.Join(node.handlers[1].GraphRoot, markerFile)
	require.NoError(t, os.Remove(marker))
	require.NoError(t, unix.Mkfifo(marker, 0o600)) // who reads it waits
	hung := make(chan error, 1)
	go func() {
		_, err := node.roots.Collect(context.WithoutCancel(t.Context()), "hung", all())
		hung <- err
	}()
	var writer *os.File
	require.Eventually(t, func() (opened bool) { // succeeds when somebody waits
		var err error
		writer, err = os.OpenFile(marker, os.O_WRONLY|unix.O_NONBLOCK, 0)
		return err == nil
	}, time.Minute, time.Millisecond)
	assert.True(t, node.collect(t, all())[image.ID].Goes)
	assert.Empty(t, hung)
	require.NoError(t, os.Remove(marker))
	write(t, marker, "hung\n") // for who reads it next
	_, err := writer.WriteString("hung\n")
	require.NoError(t, errors.Join(err, writer.Close()))
	require.NoError(t, <-hung)
}

func TestCollectionsAreLoggedOnce(t *testing.T) {
	reg := newRegistry(t)
	node := newNode(t, "vm")
	bad := node.pullSized(t, reg, "bad:1", time.Hour, 1)
	node.pullSized(t, reg, "unused:1", time.Hour, 2)
	root := node.root(t, "vm")
	require.NoError(t, root.store.SetNames(bad.ID, []string{"localhost/no-tag"}))
	logger, hook := logtest.NewNullLogger()
	root.log = logger
	opt := all()
	opt.MaxBytes, opt.High = 2*collected, 50
	for range 3 {
		_, err := node.roots.Collect(t.Context(), "vm", opt)
		require.NoError(t, err)
	}
	require.Len(t, hook.AllEntries(), 1, "trouble that stays is told once")
	entry := hook.LastEntry()
	assert.Equal(t, logrus.WarnLevel, entry.Level)
	assert.Equal(t, "images collected, and the root is still above gc_high: what is left must stay", entry.Message)
	assert.Equal(t, 1, entry.Data["images_removed"])
	assert.Contains(t, fmt.Sprint(entry.Data["faults"]), bad.ID)
	hook.Reset()
	require.NoError(t, root.store.SetNames(bad.ID, []string{"localhost/no:tag"}))
	node.age(t, bad.ID, time.Hour)
	for range 3 {
		node.collect(t, opt)
	}
	require.Len(t, hook.AllEntries(), 1)
	assert.Equal(t, "images collected", hook.LastEntry().Message)
}
