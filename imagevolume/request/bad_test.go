package request_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume/request"
)

const (
	server = request.Domain + "/container.server"
	pod    = request.Domain + "/pod"
	bare   = request.Domain
)

var web = request.Pod{Namespace: "shop", Name: "web-0"}

// volume returns an annotation with one volume that has one faulty field.
func volume(field string) string {
	lines := []string{"image: example.com/llama:7b", "mountPath: /models"}
	name, _, _ := strings.Cut(field, ":")
	kept := []string{field}
	for _, line := range lines {
		if !strings.HasPrefix(line, name+":") {
			kept = append(kept, line)
		}
	}
	return "- " + strings.Join(kept, "\n  ")
}

func list(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "- {image: llama, mountPath: /m%d}\n", i)
	}
	return b.String()
}

// The text of an error after "image volumes of container server of pod
// shop/web-0: annotation KEY: ".
var bad = []struct {
	name, key, text, want string
}{
	{"empty", pod, "", `is empty; write [] for no volume, or remove it`},
	{"only a comment", pod, "# none", `is empty; write [] for no volume, or remove it`},
	{"null", pod, "null", `is null, not a list of volumes; write "- image: ...", or [] for no volume`},
	{"null in YAML", pod, "~", `is null, not a list of volumes; write "- image: ...", or [] for no volume`},
	{"string", bare, "example.com/llama:7b", `is the string "example.com/llama:7b", not a list of volumes; write "- image: ...", or [] for no volume`},
	{"number", bare, "7", `is the number 7, not a list of volumes; write "- image: ...", or [] for no volume`},
	{"boolean", bare, "true", `is the boolean true, not a list of volumes; write "- image: ...", or [] for no volume`},
	{"one volume without a list", server, "image: llama\nmountPath: /models", `is a mapping, not a list of volumes; write "- image: ...", or [] for no volume`},
	{"JSON object", server, `{"image": "llama", "mountPath": "/models"}`, `is a mapping, not a list of volumes; write "- image: ...", or [] for no volume`},
	{"own type", server, "!volumes [{image: a, mountPath: /a}]", `is of type !volumes, not a list of volumes; write "- image: ...", or [] for no volume`},
	{"mapping called a list", server, "!!seq {image: a, mountPath: /a}", `is of type !!seq, not a list of volumes; write "- image: ...", or [] for no volume`},
	{"not YAML", server, "- image: a\n mountPath: /a", `is neither YAML nor JSON: line 1: did not find expected '-' indicator; check indentation and quotes`},
	{"not JSON", server, `[{"image": "a", "mountPath": "/a"}`, `is neither YAML nor JSON: line 1: did not find expected ',' or ']'; check indentation and quotes`},
	{"JSON and more", server, `[] []`, `is neither YAML nor JSON: did not find expected <document start>; check indentation and quotes`},
	{"control character", server, "- image: a\x00", `is neither YAML nor JSON: control characters are not allowed; check indentation and quotes`},
	{"not UTF-8", server, "- image: a\xff", `is not UTF-8; write it in UTF-8`},
	{"two documents", server, "- {image: a, mountPath: /a}\n---\n- {image: b, mountPath: /b}", `has more than one YAML document; keep one list`},
	{"second document not YAML", server, "- {image: a, mountPath: /a}\n---\n}", `is neither YAML nor JSON: line 2: did not find expected node content; check indentation and quotes`},
	{"anchor", server, "- &a {image: a, mountPath: /a}", `line 1: has a YAML anchor or alias; write the value out`},
	{"alias", server, "- {image: &i a, mountPath: /a}\n- {image: *i, mountPath: /b}", `line 1: has a YAML anchor or alias; write the value out`},
	{"alias bomb", server, "- &a [x, x]\n- &b [*a, *a]\n- &c [*b, *b]", `line 1: has a YAML anchor or alias; write the value out`},
	{"too long", server, "#" + strings.Repeat("x", 256<<10), `has more than 262144 bytes; shorten it`},
	{"too many volumes", server, list(65), `has 65 volumes; at most 64 are allowed`},

	{"volume is a string", server, "- example.com/llama:7b", `[0]: is the string "example.com/llama:7b", not a volume; write image and mountPath`},
	{"volume is null", server, "- {image: a, mountPath: /a}\n- ", `[1]: is null, not a volume; write image and mountPath`},
	{"volume is a list", server, "- - a", `[0]: is a list, not a volume; write image and mountPath`},
	{"no image", server, "- mountPath: /models", `[0]: has no image; add image: NAME`},
	{"no mountPath", server, "- image: llama", `[0]: has no mountPath; add mountPath: /PATH`},
	{"empty volume", server, "- {}", `[0]: has no image; add image: NAME`},
	{"misspelt key", server, volume("mountpath: /models"), `[0]: unknown key "mountpath"; did you mean "mountPath"?`},
	{"misspelt key by letters", server, volume("pulPolice: Always"), `[0]: unknown key "pulPolice"; did you mean "pullPolicy"?`},
	{"unknown key", server, volume("owner: 7"), `[0]: unknown key "owner"; known are image, images, mountPath, pullPolicy, mediaTypes, subPath, readOnly, scratch, scratchSize, exec`},
	{"Kubernetes' key", server, volume("reference: llama"), `[0]: unknown key "reference"; known are image, images, mountPath, pullPolicy, mediaTypes, subPath, readOnly, scratch, scratchSize, exec`},
	{"merge key", server, volume("<<: {exec: true}"), `[0]: has a key that is "<<" of type !!merge; known are image, images, mountPath, pullPolicy, mediaTypes, subPath, readOnly, scratch, scratchSize, exec`},
	{"key is a number", server, volume("1: a"), `[0]: has a key that is the number 1; known are image, images, mountPath, pullPolicy, mediaTypes, subPath, readOnly, scratch, scratchSize, exec`},
	{"key is a list", server, volume("? [a]\n  : b"), `[0]: has a key that is a list; known are image, images, mountPath, pullPolicy, mediaTypes, subPath, readOnly, scratch, scratchSize, exec`},
	{"key twice", server, volume("exec: true\n  exec: false"), `[0]: key "exec" is there twice; keep one`},
	{"key twice in JSON", server, `[{"image": "a", "image": "b", "mountPath": "/a"}]`, `[0]: key "image" is there twice; keep one`},
	{"long key", server, volume(strings.Repeat("k", 100) + ": a"), `[0]: unknown key "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk"...; known are image, images, mountPath, pullPolicy, mediaTypes, subPath, readOnly, scratch, scratchSize, exec`},

	{"image is null", server, volume("image: "), `[0].image: is null, not a string; write a string, in quotes if need be`},
	{"image is empty", server, volume(`image: ""`), `[0].image: is empty; give it a value or remove it`},
	{"image is a number", server, volume("image: 20260101"), `[0].image: is the number 20260101, not a string; write a string, in quotes if need be`},
	{"image is a JSON number", server, `[{"image": 7, "mountPath": "/a"}]`, `[0].image: is the number 7, not a string; write a string, in quotes if need be`},
	{"image is a date", server, volume("image: 2026-01-01"), `[0].image: is "2026-01-01" of type !!timestamp, not a string; write a string, in quotes if need be`},
	{"image is a list", server, volume("image: [a, b]"), `[0].image: is a list, not a string; write a string, in quotes if need be`},
	{"image is binary", server, volume("image: !!binary bGxhbWE="), `[0].image: is "bGxhbWE=" of type !!binary, not a string; write a string, in quotes if need be`},
	{"image in capitals", server, volume("image: example.com/Llama:7b"), `[0].image: "example.com/Llama:7b": invalid reference format: repository name must be lowercase; write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST`},
	{"image with a bad tag", server, volume("image: 'example.com/llama:'"), `[0].image: "example.com/llama:": invalid reference format; write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST`},
	{"image with a short digest", server, volume("image: llama@sha256:abcd"), `[0].image: "llama@sha256:abcd": invalid reference format; write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST`},
	{"image with an unknown digest", server, volume("image: llama@md5:" + strings.Repeat("a", 32)), `[0].image: "llama@md5:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa": unsupported digest algorithm; write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST`},
	{"image with a transport", server, volume("image: docker://example.com/llama:7b"), `[0].image: "docker://example.com/llama:7b" has a transport; write the name alone, without ...://`},
	{"image with space around", server, volume("image: ' llama'"), `[0].image: " llama" has space around it; remove it`},
	{"image with space within", server, volume("image: lla ma"), `[0].image: "lla ma": invalid reference format; write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST`},
	{"image with a newline", server, volume(`image: "llama\n"`), `[0].image: "llama\n" has control characters; remove them`},
	{"image with NUL", server, `[{"image": "llama\u0000", "mountPath": "/a"}]`, `[0].image: "llama\x00" has control characters; remove them`},
	{"image too long", server, volume("image: " + strings.Repeat("a", 256)), `[0].image: "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"...: repository name must not be more than 255 characters; write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST`},

	{"mountPath is null", server, volume("mountPath: null"), `[0].mountPath: is null, not a string; write a string, in quotes if need be`},
	{"mountPath is empty", server, volume("mountPath: ''"), `[0].mountPath: is empty; give it a value or remove it`},
	{"mountPath is a boolean", server, volume("mountPath: true"), `[0].mountPath: is the boolean true, not a string; write a string, in quotes if need be`},
	{"mountPath is relative", server, volume("mountPath: models"), `[0].mountPath: "models" is relative; start it with /`},
	{"mountPath is relative with a dot", server, volume("mountPath: ./models"), `[0].mountPath: "./models" is relative; start it with /`},
	{"mountPath is the root", server, volume("mountPath: /"), `[0].mountPath: "/" is the root of the container; choose a directory in it`},
	{"mountPath is the root, uncleaned", server, volume("mountPath: //./"), `[0].mountPath: "//./" is the root of the container; choose a directory in it`},
	{"mountPath goes up", server, volume("mountPath: /models/../etc"), `[0].mountPath: "/models/../etc" has ".." in it; write the path without`},
	{"mountPath is proc", server, volume("mountPath: /proc"), `[0].mountPath: "/proc" is in /proc, which belongs to the runtime; choose another path`},
	{"mountPath in sys", server, volume("mountPath: /sys/fs"), `[0].mountPath: "/sys/fs" is in /sys, which belongs to the runtime; choose another path`},
	{"mountPath in dev, uncleaned", server, volume("mountPath: //dev/./shm/"), `[0].mountPath: "//dev/./shm/" is in /dev, which belongs to the runtime; choose another path`},
	{"mountPath with a colon", server, volume("mountPath: '/models:ro'"), `[0].mountPath: "/models:ro" has ":" in it, which Kubernetes does not allow; choose another path`},
	{"mountPath with a newline", server, volume(`mountPath: "/models\n"`), `[0].mountPath: "/models\n" has control characters; remove them`},
	{"mountPath with NUL", server, `[{"image": "a", "mountPath": "/a\u0000b"}]`, `[0].mountPath: "/a\x00b" has control characters; remove them`},
	{"mountPath too long", server, volume("mountPath: " + strings.Repeat("/abcdefg", 512)), `[0].mountPath: "/abcdefg/abcdefg/abcdefg/abcdefg/abcdefg/abcdefg/abcdefg/abcdefg"... has 4096 bytes or more; shorten it`},
	{"mountPath with a long name", server, volume("mountPath: /" + strings.Repeat("a", 256)), `[0].mountPath: "/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"... has a name of more than 255 bytes; shorten it`},
	{"mountPath twice", server, "- {image: a, mountPath: /a}\n- {image: b, mountPath: /a/}", `[1].mountPath: "/a" is the path of [0] too; give each volume a path of its own`},
	{"mountPath inside another", server, "- {image: a, mountPath: /a}\n- {image: c, mountPath: /c}\n- {image: b, mountPath: /a/b}", `[2].mountPath: "/a/b" is inside "/a" of [0]; mount them side by side`},
	{"mountPath around another", server, "- {image: b, mountPath: /a/b}\n- {image: a, mountPath: /a}", `[1].mountPath: "/a/b" of [0] is inside "/a"; mount them side by side`},

	{"pullPolicy in small letters", server, volume("pullPolicy: always"), `[0].pullPolicy: "always" is not a pull policy; did you mean Always?`},
	{"pullPolicy unknown", server, volume("pullPolicy: Sometimes"), `[0].pullPolicy: "Sometimes" is not a pull policy; known are Always, IfNotPresent, Never`},
	{"pullPolicy is empty", server, volume("pullPolicy: ''"), `[0].pullPolicy: is empty; give it a value or remove it`},
	{"pullPolicy is a boolean", server, volume("pullPolicy: true"), `[0].pullPolicy: is the boolean true, not a string; write a string, in quotes if need be`},
	{"readOnly is a string", server, volume("readOnly: 'true'"), `[0].readOnly: is the string "true"; write true or false, without quotes`},
	{"readOnly is null", server, volume("readOnly: null"), `[0].readOnly: is null; write true or false, without quotes`},
	{"exec is yes", server, volume("exec: yes"), `[0].exec: is the string "yes"; write true or false, without quotes`},
	{"exec is a number", server, volume("exec: 1"), `[0].exec: is the number 1; write true or false, without quotes`},
	{"exec is called a boolean", server, volume("exec: !!bool maybe"), `[0].exec: is the boolean maybe; write true or false, without quotes`},

	{"mediaTypes is a string", server, volume("mediaTypes: a/b"), `[0].mediaTypes: is the string "a/b", not a list of media types; write [TYPE, ...]`},
	{"mediaTypes is empty", server, volume("mediaTypes: []"), `[0].mediaTypes: is empty; remove it to have all layers`},
	{"too many mediaTypes", server, volume("mediaTypes: [" + strings.Repeat("a, ", 17) + "]"), `[0].mediaTypes: has 17 media types; at most 16 are allowed`},
	{"media type is a number", server, volume("mediaTypes: [a, 7]"), `[0].mediaTypes[1]: is the number 7, not a string; write a string, in quotes if need be`},
	{"media type is empty", server, volume("mediaTypes: ['']"), `[0].mediaTypes[0]: is empty; give it a value or remove it`},
	{"media type with space", server, volume("mediaTypes: ['a b']"), `[0].mediaTypes[0]: "a b" has space in it; remove it`},
	{"media type with a newline", server, volume(`mediaTypes: ["a\n"]`), `[0].mediaTypes[0]: "a\n" has control characters; remove them`},
	{"media type with an open bracket", server, volume("mediaTypes: ['a[b']"), `[0].mediaTypes[0]: "a[b" has an open [ or ends with \; remove it`},
	{"media type with a backslash", server, volume(`mediaTypes: ['a\']`), `[0].mediaTypes[0]: "a\\" has an open [ or ends with \; remove it`},
	{"long media type", server, volume("mediaTypes: [" + strings.Repeat("a", 256) + "]"), `[0].mediaTypes[0]: "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"... has more than 255 bytes; shorten it`},

	{"subPath is a number", server, volume("subPath: 1"), `[0].subPath: is the number 1, not a string; write a string, in quotes if need be`},
	{"subPath is empty", server, volume("subPath: ''"), `[0].subPath: is empty; give it a value or remove it`},
	{"subPath is absolute", server, volume("subPath: /weights"), `[0].subPath: "/weights" is absolute; write it without / at its start`},
	{"subPath goes up", server, volume("subPath: weights/../.."), `[0].subPath: "weights/../.." has ".." in it; write the path without`},
	{"subPath goes up and back", server, volume("subPath: ../image/weights"), `[0].subPath: "../image/weights" has ".." in it; write the path without`},
	{"subPath is all", server, volume("subPath: ./."), `[0].subPath: "./." is the whole image; remove it`},
	{"subPath with NUL", server, `[{"image": "a", "mountPath": "/a", "subPath": "a\u0000b"}]`, `[0].subPath: "a\x00b" has control characters; remove them`},
	{"subPath with a long name", server, volume("subPath: a/" + strings.Repeat("a", 256)), `[0].subPath: "a/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"... has a name of more than 255 bytes; shorten it`},
	{"subPath too long", server, volume("subPath: a" + strings.Repeat("/abcdefg", 512)), `[0].subPath: "a/abcdefg/abcdefg/abcdefg/abcdefg/abcdefg/abcdefg/abcdefg/abcdef"... has 4096 bytes or more; shorten it`},

	{"images beside image", server, volume("images: [{image: b}]"), `[0]: has image beside images; keep one of them`},
	{"images beside mediaTypes", server, "- {images: [{image: b}], mountPath: /a, mediaTypes: [a]}", `[0].mediaTypes: is beside images; write it to each of them`},
	{"images beside subPath", server, "- {images: [{image: b}], mountPath: /a, subPath: a}", `[0].subPath: is beside images; write it to each of them`},
	{"images is a mapping", server, "- {images: {image: b}, mountPath: /a}", `[0].images: is a mapping, not a list of images; write "- image: ..."`},
	{"images is empty", server, "- {images: [], mountPath: /a}", `[0].images: is empty; write "- image: ..."`},
	{"too many images", server, "- {images: [" + strings.Repeat("{image: b}, ", 9) + "], mountPath: /a}", `[0].images: has 9 images; at most 8 are allowed`},
	{"images of names", server, "- {images: [{image: a}, b], mountPath: /a}", `[0].images[1]: is the string "b", not an image; write image: NAME`},
	{"images without an image", server, "- {images: [{subPath: b}], mountPath: /a}", `[0].images[0]: has no image; add image: NAME`},
	{"images with a policy each", server, "- {images: [{image: b, pullPolicy: Never}], mountPath: /a}", `[0].images[0]: unknown key "pullPolicy"; known are image, mediaTypes, subPath`},
	{"images with a misspelt key", server, "- {images: [{image: b, subpath: a}], mountPath: /a}", `[0].images[0]: unknown key "subpath"; did you mean "subPath"?`},
	{"images with a faulty image", server, "- {images: [{image: B}], mountPath: /a}", `[0].images[0].image: "B": invalid reference format: repository name must be lowercase; write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST`},
	{"images with a faulty media type", server, "- {images: [{image: b, mediaTypes: [a, ~]}], mountPath: /a}", `[0].images[0].mediaTypes[1]: is null, not a string; write a string, in quotes if need be`},

	{"scratch of a read-only volume", server, volume("scratch: pod"), `[0].scratch: is for what a container writes; add readOnly: false, or remove it`},
	{"scratchSize of a read-only volume", server, volume("scratchSize: 1GiB\n  readOnly: true"), `[0].scratchSize: is for what a container writes; add readOnly: false, or remove it`},
	{"scratch misspelt", server, volume("scratch: Pod\n  readOnly: false"), `[0].scratch: "Pod" is not a lifetime of what is written; did you mean pod?`},
	{"scratch unknown", server, volume("scratch: node\n  readOnly: false"), `[0].scratch: "node" is not a lifetime of what is written; known are container, pod`},
	{"scratchSize is a number", server, volume("scratchSize: 7\n  readOnly: false"), `[0].scratchSize: is the number 7, not a string; write a string, in quotes if need be`},
	{"scratchSize is no size", server, volume("scratchSize: much\n  readOnly: false"), `[0].scratchSize: "much" is not a size; write a number and a unit, such as 2GiB`},
	{"scratchSize too small", server, volume("scratchSize: 15MiB\n  readOnly: false"), `[0].scratchSize: "15MiB" is not between 16MiB and 16TiB; choose another size`},
	{"scratchSize too large", server, volume("scratchSize: 17TiB\n  readOnly: false"), `[0].scratchSize: "17TiB" is not between 16MiB and 16TiB; choose another size`},
	{"scratchSize beyond all", server, volume("scratchSize: 99999999999999PiB\n  readOnly: false"), `[0].scratchSize: "99999999999999PiB" is not between 16MiB and 16TiB; choose another size`},

	{"misspelt container", bare + "/contaner.server", "[]", `unknown key; did you mean image-volume.ocihold.dev/container.server?`},
	{"containers", bare + "/containers.server", "[]", `unknown key; did you mean image-volume.ocihold.dev/container.server?`},
	{"pods", bare + "/pods", "[]", `unknown key; did you mean image-volume.ocihold.dev/pod?`},
	{"no container name", bare + "/container.", "[]", `"" is not a container name; write image-volume.ocihold.dev/container.NAME`},
	{"no container", bare + "/container", "[]", `unknown key; known are image-volume.ocihold.dev, image-volume.ocihold.dev/pod and image-volume.ocihold.dev/container.NAME`},
	{"impossible container name", bare + "/container.Server_1", "[]", `"Server_1" is not a container name; write image-volume.ocihold.dev/container.NAME`},
	{"other suffix", bare + "/volumes", "[]", `unknown key; known are image-volume.ocihold.dev, image-volume.ocihold.dev/pod and image-volume.ocihold.dev/container.NAME`},
	{"no suffix", bare + "/", "[]", `unknown key; known are image-volume.ocihold.dev, image-volume.ocihold.dev/pod and image-volume.ocihold.dev/container.NAME`},
	{"suffix with a newline", bare + "/a\nb", "[]", `unknown key; known are image-volume.ocihold.dev, image-volume.ocihold.dev/pod and image-volume.ocihold.dev/container.NAME`},
}

func TestForContainerRefuses(t *testing.T) {
	for _, tc := range bad {
		t.Run(tc.name, func(t *testing.T) {
			_, err := request.ForContainer(web, map[string]string{tc.key: tc.text}, "server")
			key := tc.key
			if strings.Contains(key, "\n") {
				key = fmt.Sprintf("%q", key)
			}
			require.EqualError(t, err, "image volumes of container server of pod shop/web-0: annotation "+key+": "+tc.want)
			require.Empty(t, request.All(map[string]string{tc.key: tc.text}))
		})
	}
}
