package images

import (
	"bytes"
	"fmt"
	"os/exec"
	"path"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const hostPlatform = "linux/" + runtime.GOARCH

// Pause makes the pause image of a static program.
func Pause(file string) (v1.Image, error) {
	pause, err := program(file, "pause")
	if err != nil {
		return nil, fmt.Errorf("make the pause image: %w", err)
	}
	return Image(Config{Entrypoint: []string{"/pause"}}, []Entry{pause})
}

// Busybox makes a base image of this machine's static busybox (Debian package
// busybox-static), with all its applets in /bin.
func Busybox() (v1.Image, error) {
	const busybox = "/bin/busybox"
	entry, err := program(busybox, "bin/busybox")
	if err != nil {
		return nil, fmt.Errorf("make the base image (Debian package busybox-static): %w", err)
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list the applets of busybox: %w", err)
	}
	entries := []Entry{
		Dir("bin", 0o755), Dir("etc", 0o755), Dir("root", 0o700), Dir("tmp", 0o1777), Dir("usr", 0o755), Dir("var", 0o755),
		File("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n", 0o644),
		File("etc/group", "root:x:0:\nnogroup:x:65534:\n", 0o644),
		entry,
	}
	for applet := range bytes.FieldsSeq(applets) {
		if name := string(applet); name != "busybox" && !strings.Contains(name, "/") {
			entries = append(entries, Symlink(path.Join("bin", name), "busybox"))
		}
	}
	return Image(Config{Env: []string{"PATH=/bin"}}, entries)
}

// Stack makes the layers of an image of n layers in which every kind of change
// between layers happens: files added, replaced and removed, directories made
// opaque, removed and made again as something else, links into lower layers,
// owners, modes, extended attributes. Layer i also has a file layer-I of its own.
func Stack(n int) [][]Entry {
	layers := make([][]Entry, n)
	for i := range layers {
		layers[i] = []Entry{File(fmt.Sprintf("layer-%03d", i), fmt.Sprintf("content of layer %d\n", i), 0o644)}
	}
	linked := File("tree/linked", "linked\n", 0o640).Owned(3, 4)
	layers[0] = append(layers[0],
		Dir("tree", 0o755),
		File("tree/kept", "kept\n", 0o600).Owned(1000, 1001),
		File("tree/replaced", "old\n", 0o644),
		File("tree/removed", "removed\n", 0o644),
		File("tree/becomes-dir", "file\n", 0o644),
		Dir("tree/opaque", 0o755),
		File("tree/opaque/old", "old\n", 0o644),
		Dir("tree/becomes-file", 0o750),
		File("tree/becomes-file/old", "old\n", 0o644),
		Dir("tree/sticky", 0o1777).Owned(7, 8),
		File("tree/setuid", "#!/bin/sh\nid -u\n", 0o4755),
		File("tree/attributes", "attributes\n", 0o644).WithXattr("user.test", "value"),
		Symlink("tree/relative", "kept"),
		Symlink("tree/absolute", "/tree/kept"),
		Symlink("tree/dangling", "nowhere"),
		linked,
		Hardlink("tree/link", linked),
		File("tree/spaces and ü", "name\n", 0o644),
		Dir("tree/empty", 0o700),
	)
	if n > 1 {
		// Not the top layer: what it does must show through those above.
		mid := n / 2
		layers[mid] = append(layers[mid],
			File("tree/replaced", "new\n", 0o755).Owned(5, 6),
			Whiteout("tree/removed"),
			Dir("tree/becomes-dir", 0o711),
			File("tree/becomes-dir/inside", "inside\n", 0o644),
			Dir("tree/opaque", 0o700).Owned(9, 9),
			Opaque("tree/opaque"),
			File("tree/opaque/new", "new\n", 0o644),
			File("tree/becomes-file", "file\n", 0o644),
			Symlink("tree/to-lower", "../layer-000"),
		)
	}
	return layers
}
