package imageservice_test

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
	"github.com/ocihold/ocihold/storage/imageservice"
)

const here = "linux/" + runtime.GOARCH

func TestPullGoesIntoTheHandlersRootForItsPlatform(t *testing.T) {
	n := newNode(t, nil)
	linux, wasm := imageOf(t, "linux", here, ""), imageOf(t, "wasm", "wasi/wasm", "")
	ref := n.push(t, "app:1", indexOf(t, wasm, linux))

	assert.Equal(t, idOf(t, wasm), n.pull(t, "wasm", ref))
	assert.Nil(t, n.status(t, spec("vm", ref)), "another handler's copy")
	assert.Nil(t, n.status(t, annotated(ref)), "another handler's copy")
	assert.Equal(t, idOf(t, linux), n.pull(t, "", ref))
	assert.Equal(t, idOf(t, linux), n.pull(t, "runc", ref), "a runtime without a root")
	assert.Equal(t, idOf(t, linux), n.pull(t, "default", ref))
	assert.Equal(t, idOf(t, linux), n.status(t, annotated(ref)).GetId())
	assert.Equal(t, idOf(t, wasm), n.status(t, spec("wasm", ref)).GetId())
	assert.Nil(t, n.status(t, spec("vm", ref)))
	assert.Nil(t, n.status(t, spec("vm", idOf(t, linux))), "by id, too")

	assert.Equal(t, idOf(t, linux), n.pull(t, "vm", ref))
	images := n.list(t)
	require.Len(t, images, 2)
	for _, image := range images {
		assert.Equal(t, []string{ref}, image.GetRepoTags())
		assert.Len(t, image.GetRepoDigests(), 2, "of the index and the image")
		assert.Empty(t, image.GetSpec().GetRuntimeHandler())
		assert.NotZero(t, image.GetSize())
	}
}

func TestChoosing(t *testing.T) {
	n := newNode(t, func(o *imageservice.Options) {
		o.Routes = []imageservice.Route{{Image: "*/routed/*", Handler: "vm"}, {Image: "*/routed/*", Handler: "wasm"}}
	})
	image := indexOf(t, imageOf(t, "a", here, ""), imageOf(t, "a", "wasi/wasm", ""))
	plain, routed := n.push(t, "plain/app:1", image), n.push(t, "routed/app:1", image)
	const ours, theirs = imageservice.HandlerAnnotation, imageservice.ContainerdHandlerAnnotation
	for name, c := range map[string]struct {
		spec *cri.ImageSpec
		root string // or what the error says
	}{
		"nothing":                        {spec("", plain), "default"},
		"handler":                        {spec("vm", plain), "vm"},
		"route":                          {spec("", routed), "vm"},
		"handler before route":           {spec("runc", routed), "default"},
		"annotations of others":          {annotated(plain), "default"},
		"annotation":                     {annotated(plain, ours, "wasm"), "wasm"},
		"containerd's annotation":        {annotated(plain, theirs, "wasm"), "wasm"},
		"ours before containerd's":       {annotated(plain, ours, "default", theirs, "wasm"), "default"},
		"annotation before route":        {annotated(routed, ours, "wasm"), "wasm"},
		"annotation that changes naught": {annotated(routed, ours, "vm"), "vm"},
		"annotation not allowed":         {annotated(plain, ours, "vm"), "allow_annotation = true in [handlers.vm]"},
		"annotation away from route":     {annotated(routed, ours, "runc"), "allow_annotation = true in [handlers.runc]"},
		"unknown handler":                {spec("kata", plain), `"kata" is not known: there are default, runc, vm, wasm`},
		"unknown in annotation":          {annotated(plain, theirs, "kata"), `"kata" is not known: there are default, runc, vm, wasm`},
		"no image":                       {spec("vm", ""), "no image is named"},
		"bad name":                       {spec("vm", "A B"), "invalid image reference"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{Image: c.spec})
			if len(c.root) > len("default") {
				assert.Equal(t, codes.InvalidArgument, status.Code(err))
				require.ErrorContains(t, err, c.root)
				return
			}
			require.NoError(t, err)
			found, err := n.roots.Find(t.Context(), c.spec.GetImage())
			require.NoError(t, err)
			require.Len(t, found, 1)
			assert.Equal(t, c.root, found[0].Handlers[0])
			require.NoError(t, n.roots.Remove(t.Context(), c.spec.GetImage(), nil))
		})
	}
}

func TestUserOfAnImage(t *testing.T) {
	n := newNode(t, nil)
	only := n.push(t, "only:1", imageOf(t, "only", here, "1000:50"))
	n.pull(t, "vm", only)
	bare := &cri.ImageSpec{Image: only}
	assert.Equal(t, int64(1000), n.status(t, bare).GetUid().GetValue(), "kubelet asks with neither handler nor annotations")
	assert.Nil(t, n.status(t, annotated(only)))

	named := n.push(t, "named:1", imageOf(t, "named", here, "app"))
	n.pull(t, "vm", named)
	assert.Equal(t, "app", n.status(t, spec("vm", named)).GetUsername())
	assert.Nil(t, n.status(t, spec("vm", named)).GetUid())

	// One name, other images.
	n.push(t, "only:1", imageOf(t, "moved", here, ""))
	n.pull(t, "", only)
	_, err := n.images.ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: bare})
	assert.Equal(t, codes.FailedPrecondition, status.Code(err))
	require.ErrorContains(t, err, `"" for default, "1000:50" for vm`)
	assert.Nil(t, n.status(t, spec("", "absent:1")))
	assert.Equal(t, int64(1000), n.status(t, spec("vm", only)).GetUid().GetValue())

	n.push(t, "only:1", imageOf(t, "again", here, "0"))
	n.pull(t, "vm", only)
	assert.NotNil(t, n.status(t, bare), "none and 0 are both root")
}

func TestVerboseStatus(t *testing.T) {
	n := newNode(t, nil)
	ref := n.push(t, "a:1", imageOf(t, "x", here, "7"))
	n.pull(t, "vm", ref)
	n.pull(t, "", ref)
	resp, err := n.images.ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: spec("", ref), Verbose: true})
	require.NoError(t, err)
	var info struct {
		Labels    map[string]string `json:"labels"`
		ImageSpec struct {
			OS     string `json:"os"`
			Config struct{ User string }
		} `json:"imageSpec"`
		Handlers []string `json:"handlers"`
	}
	require.NoError(t, json.Unmarshal([]byte(resp.GetInfo()["info"]), &info))
	assert.Equal(t, map[string]string{"label": "x"}, info.Labels)
	assert.Equal(t, "linux", info.ImageSpec.OS)
	assert.Equal(t, "7", info.ImageSpec.Config.User)
	assert.Equal(t, []string{"default", "vm"}, info.Handlers)
}

func TestOneIDIsListedOnceWithAllNames(t *testing.T) {
	n := newNode(t, func(o *imageservice.Options) {
		o.ReportRuntimeHandler = true
		o.Pinned = []string{"*pinned/*"}
	})
	image, other := imageOf(t, "a", here, "5"), imageOf(t, "b", here, "")
	one, two := n.push(t, "one:1", image), n.push(t, "two:1", image)
	n.pull(t, "", one)
	n.pull(t, "vm", two)
	n.pull(t, "vm", n.push(t, "pinned/b:1", other))
	images := n.list(t)
	require.Len(t, images, 2)
	assert.ElementsMatch(t, []string{one, two}, images[idOf(t, image)].GetRepoTags())
	assert.Empty(t, images[idOf(t, image)].GetSpec().GetRuntimeHandler())
	assert.Equal(t, int64(5), images[idOf(t, image)].GetUid().GetValue())
	assert.False(t, images[idOf(t, image)].GetPinned())
	assert.Equal(t, "vm", images[idOf(t, other)].GetSpec().GetRuntimeHandler())
	assert.True(t, images[idOf(t, other)].GetPinned())

	digest, err := image.Digest()
	require.NoError(t, err)
	filter := &cri.ImageFilter{Image: &cri.ImageSpec{Image: n.host + "/one@" + digest.String()}}
	resp, err := n.images.ListImages(t.Context(), &cri.ListImagesRequest{Filter: filter})
	require.NoError(t, err)
	require.Len(t, resp.GetImages(), 1)
	assert.Equal(t, idOf(t, image), resp.GetImages()[0].GetId())

	vm, err := n.roots.Handler("vm")
	require.NoError(t, err)
	require.NoError(t, vm.Lease(t.Context(), idOf(t, image)))
	assert.True(t, n.list(t)[idOf(t, image)].GetPinned())
	_, err = n.images.RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: one}})
	assert.Equal(t, codes.FailedPrecondition, status.Code(err))
	require.ErrorContains(t, err, "in use")
}

func TestStreamImages(t *testing.T) {
	n := newNode(t, nil)
	id := n.pull(t, "vm", n.push(t, "a:1", imageOf(t, "a", here, "")))
	const count = 300
	n.crio.change(func() {
		for i := range count { // more than one message
			n.crio.images = append(n.crio.images, &cri.Image{Id: fmt.Sprint(i), Size: 1, RepoTags: []string{strings.Repeat("x", 100<<10)}})
		}
	})
	stream, err := n.images.StreamImages(t.Context(), &cri.StreamImagesRequest{})
	require.NoError(t, err)
	ids := make(map[string]int)
	messages := 0
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		messages++
		require.NotEmpty(t, resp.GetImages())
		for _, image := range resp.GetImages() {
			ids[image.GetId()]++
		}
	}
	assert.Len(t, ids, count+1)
	assert.Equal(t, 1, ids[id])
	assert.Greater(t, messages, 10)
	assert.Len(t, n.list(t), count+1, "30 MB at once")
}

func TestBadRecordsAreLeftOutAndNamedOnce(t *testing.T) {
	n := newNode(t, nil)
	good := n.pull(t, "vm", n.push(t, "good:1", imageOf(t, "good", here, "")))
	bad := n.pull(t, "vm", n.push(t, "bad:1", imageOf(t, "bad", here, "")))
	config := filepath.Join(n.dir, "vm", "overlay-images", bad, "="+base64.StdEncoding.EncodeToString([]byte("sha256:"+bad)))
	require.NoError(t, os.WriteFile(config, []byte("{"), 0o600))
	for range 3 {
		images := n.list(t)
		assert.Contains(t, images, good)
		assert.NotContains(t, images, bad)
	}
	var named int
	for _, entry := range n.logged.AllEntries() {
		if strings.Contains(entry.Message, bad) {
			named++
		}
	}
	assert.Equal(t, 1, named)
}

func TestPullErrorsAsKubeletMatchesThem(t *testing.T) {
	n := newNode(t, nil)
	ref := n.push(t, "a:1", imageOf(t, "a", here, ""))
	pull := func() error {
		_, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{Image: spec("vm", ref)})
		return err
	}
	n.setFault(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) })
	err := pull()
	assert.Equal(t, codes.NotFound, status.Code(err))

	n.setFault(nil)
	policy := `{"default":[{"type":"reject"}]}`
	require.NoError(t, os.WriteFile(filepath.Join(n.dir, "policy.json"), []byte(policy), 0o600))
	err = pull()
	assert.Equal(t, codes.Unknown, status.Code(err))
	assert.Regexp(t, "^SignatureValidationFailed: ", status.Convert(err).Message())

	_, err = n.images.PullImage(t.Context(), &cri.PullImageRequest{Image: spec("vm", "127.0.0.1:1/no/registry:1")})
	assert.Equal(t, codes.Unknown, status.Code(err))
	assert.Regexp(t, "^RegistryUnavailable: ", status.Convert(err).Message())
}

func TestPolicyOfANamespace(t *testing.T) {
	policies := t.TempDir()
	n := newNode(t, func(o *imageservice.Options) { o.PolicyDir = policies })
	require.NoError(t, os.WriteFile(filepath.Join(policies, "strict.json"), []byte(`{"default":[{"type":"reject"}]}`), 0o600))
	ref := n.push(t, "a:1", imageOf(t, "a", here, ""))
	pull := func(namespace string) error {
		_, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{
			Image: spec("vm", ref), SandboxConfig: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Namespace: namespace}},
		})
		return err
	}
	require.ErrorContains(t, pull("strict"), "SignatureValidationFailed")
	require.NoError(t, pull("other"))
	require.ErrorContains(t, pull("strict"), "SignatureValidationFailed", "the image is there")
}

func TestPullProvesAccessForTheNamespace(t *testing.T) {
	n := newNode(t, nil)
	for name, tc := range map[string]struct {
		auth *cri.AuthConfig
		own  bool
		all  bool
	}{
		"with credentials":       {auth: &cri.AuthConfig{Username: "u", Password: "p"}, own: true},
		"without":                {own: true, all: true},
		"with empty credentials": {auth: &cri.AuthConfig{}, own: true, all: true},
	} {
		t.Run(name, func(t *testing.T) {
			ref := n.push(t, "a:1", imageOf(t, name, here, ""))
			answer, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{
				Image: spec("vm", ref), Auth: tc.auth,
				SandboxConfig: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Namespace: "team"}},
			})
			require.NoError(t, err)
			root, err := n.roots.Handler("vm")
			require.NoError(t, err)
			for namespace, want := range map[string]bool{"team": tc.own, "other": tc.all} {
				proven, err := root.Proven(t.Context(), answer.GetImageRef(), namespace)
				require.NoError(t, err)
				assert.Equal(t, want, proven, namespace)
			}
		})
	}
}

func TestCredentialsOfTheCall(t *testing.T) {
	n := newNode(t, nil)
	ref := n.push(t, "a:1", imageOf(t, "a", here, ""))
	var asked []string
	n.setFault(func(w http.ResponseWriter, r *http.Request) {
		n.mu.Lock()
		defer n.mu.Unlock()
		if name, password, ok := r.BasicAuth(); ok {
			asked = append(asked, name+":"+password)
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="r"`)
		w.WriteHeader(http.StatusUnauthorized)
	})
	for name, c := range map[string]struct {
		auth *cri.AuthConfig
		want string
	}{
		"fields":  {&cri.AuthConfig{Username: "u", Password: "p:q"}, "u:p:q"},
		"encoded": {&cri.AuthConfig{Auth: base64.StdEncoding.EncodeToString([]byte("v:p:q"))}, "v:p:q"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{Image: spec("", ref), Auth: c.auth})
			assert.Equal(t, codes.PermissionDenied, status.Code(err))
			n.mu.Lock()
			defer n.mu.Unlock()
			assert.Contains(t, asked, c.want)
			assert.NotContains(t, err.Error(), "p:q")
		})
	}
	_, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{Image: spec("", ref), Auth: &cri.AuthConfig{Auth: "=!"}})
	assert.Equal(t, codes.InvalidArgument, status.Code(err))
}

func TestPullLeftToCRIO(t *testing.T) {
	n := newNode(t, func(o *imageservice.Options) { o.Handlers["default"] = imageservice.Handler{CRIOPulls: true} })
	resp, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{
		Image: spec("", "reg/a:1"), Auth: &cri.AuthConfig{Username: "u"},
		SandboxConfig: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Namespace: "ns"}},
	})
	require.NoError(t, err)
	assert.Equal(t, "pulled-by-crio", resp.GetImageRef(), "the id, as in other answers")
	assert.Equal(t, "reg/a:1", n.crio.pulled[0].GetImage().GetImage())
	assert.Equal(t, "u", n.crio.pulled[0].GetAuth().GetUsername())
	assert.Equal(t, "ns", n.crio.pulled[0].GetSandboxConfig().GetMetadata().GetNamespace())
}

func TestPullByCRIOProvesAccessForTheNamespace(t *testing.T) {
	n := newNode(t, func(o *imageservice.Options) { o.Handlers["default"] = imageservice.Handler{CRIOPulls: true} })
	root, err := n.roots.Handler("")
	require.NoError(t, err)
	image, err := root.Pull(t.Context(), n.push(t, "a:1", imageOf(t, "a", here, "")), storage.PullOptions{Auth: &storage.Auth{Username: "u"}})
	require.NoError(t, err)
	n.crio.pullsID = image.ID
	for _, namespace := range []string{"", "ns"} {
		_, err = n.images.PullImage(t.Context(), &cri.PullImageRequest{
			Image: spec("", "reg/a:1"), SandboxConfig: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Namespace: namespace}},
		})
		require.NoError(t, err)
		for asked, want := range map[string]bool{"": false, "ns": namespace == "ns", "other": false} {
			proven, err := root.Proven(t.Context(), image.ID, asked)
			require.NoError(t, err)
			assert.Equal(t, want, proven, "%q after a pull for %q", asked, namespace)
		}
	}
}

func TestArtifactsAreImages(t *testing.T) {
	n := newNode(t, nil)
	ref := n.push(t, "artifact:1", mutate.ConfigMediaType(imageOf(t, "a", here, ""), "application/vnd.example.model"))
	for _, handler := range []string{"", "vm"} {
		id := n.pull(t, handler, ref)
		status := n.status(t, spec(handler, ref))
		assert.Equal(t, id, status.GetId())
		assert.Equal(t, []string{ref}, status.GetRepoTags())
		assert.Len(t, status.GetRepoDigests(), 1, "that of what was made of it is in no registry")
	}
	assert.Empty(t, n.crio.pulled)
}

func TestAuthFileOfANamespace(t *testing.T) {
	auths := t.TempDir()
	n := newNode(t, func(o *imageservice.Options) { o.AuthDir = auths })
	image := n.push(t, "image:1", imageOf(t, "a", here, ""))
	leave := func(ref string) string {
		file := filepath.Join(auths, fmt.Sprintf("team-%x.json", sha256.Sum256([]byte(strings.TrimSuffix(ref, ":1")))))
		require.NoError(t, os.WriteFile(file, []byte("{}"), 0o600))
		return file
	}
	pull := func(namespace, ref string) error {
		_, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{
			Image: spec("", ref), SandboxConfig: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Namespace: namespace}},
		})
		return err
	}
	forImage := leave(image)
	require.NoError(t, pull("other", image))
	require.FileExists(t, forImage, "it is for another namespace")
	require.NoError(t, pull("team", image))
	require.NoFileExists(t, forImage, "it is for one pull")
	used, err := os.ReadDir(filepath.Join(auths, "in-use"))
	require.NoError(t, err)
	assert.Empty(t, used)

	require.NoError(t, os.WriteFile(leave(image), []byte("no JSON"), 0o600))
	require.Error(t, pull("team", image), "it counts, and not the node's")
}

func TestPullThatMustNotBe(t *testing.T) {
	n := newNode(t, func(o *imageservice.Options) {
		o.MayPull = func(_ context.Context, root string) error { return errors.New("not now into " + root) }
	})
	ref := n.push(t, "a:1", imageOf(t, "a", here, ""))
	_, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{Image: spec("vm", ref)})
	require.ErrorContains(t, err, "not now into vm")
	n.pull(t, "", ref)
}

func TestRemove(t *testing.T) {
	n := newNode(t, nil)
	image := imageOf(t, "a", here, "")
	ref, id := n.push(t, "a:1", image), idOf(t, image)
	remove := func(s *cri.ImageSpec) error {
		_, err := n.images.RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: s})
		return err
	}
	pull := func() {
		n.pull(t, "", ref)
		n.pull(t, "vm", ref)
	}
	pull()
	for name, c := range map[string]struct {
		container *cri.Container
		volume    string
	}{
		"root file system": {container: &cri.Container{Id: "c1", ImageId: id}},
		"image volume":     {container: &cri.Container{Id: "c1", ImageId: "other"}, volume: id},
	} {
		t.Run(name, func(t *testing.T) {
			c.container.Labels = map[string]string{"io.kubernetes.pod.namespace": "ns", "io.kubernetes.pod.name": "pod"}
			c.container.Metadata = &cri.ContainerMetadata{Name: "main"}
			n.crio.change(func() {
				n.crio.containers = []*cri.Container{c.container}
				n.crio.volumes = map[string]string{"c1": c.volume}
			})
			for _, s := range []*cri.ImageSpec{{Image: ref}, {Image: id}, spec("vm", ref)} {
				err := remove(s)
				assert.Equal(t, codes.FailedPrecondition, status.Code(err))
				require.ErrorContains(t, err, "container c1 (ns/pod/main)")
			}
			assert.NotNil(t, n.status(t, spec("vm", id)))
			assert.NotNil(t, n.status(t, spec("default", id)))
		})
	}
	n.crio.change(func() { n.crio.containers, n.crio.volumes = nil, nil })

	require.NoError(t, remove(spec("vm", ref)))
	assert.Nil(t, n.status(t, spec("vm", id)))
	assert.NotNil(t, n.status(t, spec("default", id)), "with a handler, only from its root")
	require.NoError(t, remove(spec("vm", ref)), "again")
	pull()
	require.NoError(t, remove(&cri.ImageSpec{Image: id}))
	assert.Empty(t, n.list(t), "without, from every root")
	assert.Empty(t, n.crio.removed)
	require.NoError(t, remove(&cri.ImageSpec{Image: "artifact:1"}))
	assert.Equal(t, []string{"artifact:1"}, n.crio.removed, "what is not ours")
}

func TestWhatOnlyCRIOHas(t *testing.T) {
	n := newNode(t, nil)
	image := imageOf(t, "a", here, "")
	id := n.pull(t, "vm", n.push(t, "a:1", image))
	n.crio.change(func() {
		n.crio.images = []*cri.Image{
			{Id: "artifact", RepoTags: []string{"artifact:1"}, Size: 1},
			{Id: id, RepoTags: []string{"seen:1"}, Size: 1}, // CRI-O sees the handlers' roots
		}
	})
	assert.Len(t, n.list(t), 2)
	assert.Equal(t, "artifact", n.status(t, annotated("artifact:1")).GetId())
	assert.Equal(t, "artifact", n.status(t, &cri.ImageSpec{Image: "artifact:1"}).GetId())
	assert.Nil(t, n.status(t, spec("vm", "artifact:1")))
	assert.Nil(t, n.status(t, annotated("seen:1")))
}

func TestImageFsInfo(t *testing.T) {
	n := newNode(t, nil)
	get := func() *cri.FilesystemUsage {
		resp, err := n.images.ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
		require.NoError(t, err)
		require.Len(t, resp.GetImageFilesystems(), 1, "all roots are on one disk")
		require.Len(t, resp.GetContainerFilesystems(), 1)
		assert.Equal(t, resp.GetImageFilesystems()[0].GetFsId().GetMountpoint(), resp.GetContainerFilesystems()[0].GetFsId().GetMountpoint())
		return resp.GetImageFilesystems()[0]
	}
	before := get()
	n.pull(t, "vm", n.push(t, "a:1", imageOf(t, strings.Repeat("x", 1<<20), here, "")))
	after := get()
	assert.GreaterOrEqual(t, after.GetUsedBytes().GetValue(), before.GetUsedBytes().GetValue()+1<<20)
	assert.Greater(t, after.GetInodesUsed().GetValue(), before.GetInodesUsed().GetValue())
	assert.NotZero(t, after.GetTimestamp())
}

func TestRootThatIsNotMounted(t *testing.T) {
	n := newNode(t, nil)
	ref := n.push(t, "a:1", imageOf(t, "a", here, ""))
	n.pull(t, "vm", ref)
	id := n.pull(t, "", ref)
	require.NoError(t, os.Rename(filepath.Join(n.dir, "vm"), filepath.Join(n.dir, "away")))
	require.NoError(t, os.Mkdir(filepath.Join(n.dir, "vm"), 0o700))
	_, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{Image: spec("vm", ref)})
	assert.Equal(t, codes.FailedPrecondition, status.Code(err))
	_, err = n.images.ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: spec("vm", ref)})
	assert.Equal(t, codes.FailedPrecondition, status.Code(err))
	assert.Contains(t, n.list(t), id)
	_, err = n.images.ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
	require.NoError(t, err)
	entries, err := os.ReadDir(filepath.Join(n.dir, "vm"))
	require.NoError(t, err)
	assert.Empty(t, entries, "nothing is written where the disk should be")
}

func TestForwarding(t *testing.T) {
	n := newNode(t, nil)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "question", "a", "question", "b")
	var header, trailer metadata.MD
	large := strings.Repeat("v", 20<<20)
	resp, err := n.runtime.Version(ctx, &cri.VersionRequest{Version: large}, grpc.Header(&header))
	require.NoError(t, err)
	assert.Len(t, resp.GetVersion(), len(large))
	assert.Equal(t, "none", resp.GetRuntimeVersion())
	assert.Equal(t, []string{"a,b"}, header["answer"])
	assert.Equal(t, "application/grpc", resp.GetRuntimeName(), "CRI-O takes nothing else for gRPC")

	fail := metadata.AppendToOutgoingContext(t.Context(), "fail", "no room")
	_, err = n.runtime.Version(fail, &cri.VersionRequest{}, grpc.Trailer(&trailer))
	assert.Equal(t, codes.ResourceExhausted, status.Code(err))
	assert.Equal(t, "no room", status.Convert(err).Message())
	require.Len(t, status.Convert(err).Details(), 1)
	assert.Equal(t, []string{"no room"}, trailer["why"])

	wait, cancel := contextWithTimeout(t, "wait", 200*time.Millisecond)
	defer cancel()
	_, err = n.runtime.Version(wait, &cri.VersionRequest{})
	assert.Equal(t, codes.DeadlineExceeded, status.Code(err))
	limited, cancel := contextWithTimeout(t, "question", time.Minute)
	defer cancel()
	resp, err = n.runtime.Version(limited, &cri.VersionRequest{})
	require.NoError(t, err)
	assert.Equal(t, "set", resp.GetRuntimeVersion(), "the deadline goes with the call")

	events, err := n.runtime.GetContainerEvents(t.Context(), &cri.GetEventsRequest{})
	require.NoError(t, err)
	for _, id := range []string{"a", "b", "c"} {
		event, err := events.Recv()
		require.NoError(t, err)
		assert.Equal(t, id, event.GetContainerId())
	}
	_, err = events.Recv()
	assert.Equal(t, codes.Aborted, status.Code(err))

	err = n.conn.Invoke(t.Context(), "/runtime.v1.ImageService/NotYetInvented", &cri.VersionRequest{}, &cri.VersionResponse{})
	assert.Equal(t, codes.Unimplemented, status.Code(err), "says CRI-O")
}

func TestWithoutCRIO(t *testing.T) {
	n := newNode(t, nil)
	ref := n.push(t, "a:1", imageOf(t, "a", here, ""))
	n.crio.server.Stop()
	id := n.pull(t, "vm", ref)
	assert.Contains(t, n.list(t), id)
	assert.Equal(t, id, n.status(t, &cri.ImageSpec{Image: ref}).GetId())
	assert.Nil(t, n.status(t, spec("", "absent:1")))
	_, err := n.images.RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
	assert.Equal(t, codes.Unavailable, status.Code(err))
	require.ErrorContains(t, err, n.crio.socket)
	assert.Contains(t, n.list(t), id, "nothing is removed")
	_, err = n.runtime.Version(t.Context(), &cri.VersionRequest{})
	assert.Equal(t, codes.Unavailable, status.Code(err))
	require.ErrorContains(t, err, n.crio.socket)

	n.crio.start(t)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		_, err := n.runtime.Version(t.Context(), &cri.VersionRequest{})
		assert.NoError(c, err)
	}, 10*time.Second, 50*time.Millisecond, "it is back when CRI-O is")
	_, err = n.images.RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
	require.NoError(t, err)
	assert.Empty(t, n.list(t))
}
