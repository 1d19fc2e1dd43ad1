package nriplugin_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/request"
	"github.com/ocihold/ocihold/nriplugin"
)

// recorder records what it is told, and answers what it is set to.
type recorder struct {
	mu         sync.Mutex
	calls      []string
	pod        imagevolume.Pod
	container  imagevolume.Container
	given      []imagevolume.Given
	err        error
	containers map[string][]imagevolume.Container
	held       chan struct{} // if not nil, creations wait for its end
}

func (r *recorder) call(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, name)
}

// take returns and forgets the calls.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	calls := r.calls
	r.calls = nil
	return calls
}

func (r *recorder) RunPod(p imagevolume.Pod) { r.call("run " + p.ID) }
func (r *recorder) RemovePod(id string)      { r.call("remove " + id) }

func (r *recorder) EndContainer(pod, container string) { r.call("end " + pod + "/" + container) }

func (r *recorder) CreateContainer(p imagevolume.Pod, c imagevolume.Container) ([]imagevolume.Given, error) {
	r.call("create " + p.ID + "/" + c.ID)
	if r.held != nil {
		<-r.held
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pod, r.container = p, c
	return r.given, r.err
}

func (r *recorder) Synchronize(pods []imagevolume.Pod, containers map[string][]imagevolume.Container) {
	r.mu.Lock()
	r.containers = containers
	r.mu.Unlock()
	for _, p := range pods {
		r.call("synchronize " + p.ID)
	}
}

// imageID is an image's, and crioVolumes is what CRI-O says of a container that
// has it, an artifact of another kind, and directories of the host.
const imageID = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

const crioVolumes = `[
	{"container_path":"/h","host_path":"/srv","readonly":false},
	{"container_path":"/i","host_path":"/srv","readonly":false,"image":{}},
	{"container_path":"/n","host_path":"/s/overlay/l/merged","readonly":true,"image":{"image":"` + imageID + `"}},
	{"container_path":"/f","host_path":"/blobs/f","readonly":true,"image":{"image":"sha512:0123"}}
]`

var (
	pod = &api.PodSandbox{
		Id: "p", Name: "pod", Namespace: "ns", Annotations: map[string]string{request.Domain: "[]"},
		Linux: &api.LinuxPodSandbox{Namespaces: []*api.LinuxNamespace{{Type: "network", Path: "/net"}, {Type: "user", Path: "/user"}}},
	}
	container = &api.Container{
		Id: "c", PodSandboxId: "p", Name: "ctr",
		Annotations: map[string]string{"io.kubernetes.container.name": "ctr", "io.kubernetes.cri-o.Volumes": crioVolumes},
		Mounts:      []*api.Mount{{Destination: "/etc/hosts", Source: "/hosts"}},
	}
)

// startRuntime starts NRI's own runtime side, which knows one pod with one container.
func startRuntime(t *testing.T, socket string) *adaptation.Adaptation {
	t.Helper()
	sync := func(ctx context.Context, f adaptation.SyncCB) error {
		_, err := f(ctx, []*api.PodSandbox{pod}, []*api.Container{container})
		return err
	}
	update := func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil }
	runtime, err := adaptation.New("test", "1", sync, update,
		adaptation.WithSocketPath(socket), adaptation.WithPluginPath(t.TempDir()), adaptation.WithPluginConfigPath(t.TempDir()))
	require.NoError(t, err)
	require.NoError(t, runtime.Start())
	return runtime
}

// start runs a plugin until the test ends.
func start(t *testing.T, socket string, volumes nriplugin.Volumes) *nriplugin.Plugin {
	t.Helper()
	return startWith(t, nriplugin.Options{Socket: socket}, volumes)
}

// startWith is start with more options.
func startWith(t *testing.T, options nriplugin.Options, volumes nriplugin.Volumes) *nriplugin.Plugin {
	t.Helper()
	log := logrus.New()
	log.SetOutput(io.Discard)
	options.Name, options.Index, options.Log = "ocihold", "10", log
	p := nriplugin.New(options, volumes)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return p
}

// registered waits until the runtime passes events on to the plugin, which is
// some moments after that has answered the last question of its registration.
func registered(t *testing.T, runtime *adaptation.Adaptation, p *nriplugin.Plugin) {
	t.Helper()
	require.Eventually(t, p.Registered, 10*time.Second, 10*time.Millisecond)
	runtime.BlockPluginSync().Unblock()
}

func TestEvents(t *testing.T) {
	defer goleak.VerifyNone(t)
	socket := filepath.Join(t.TempDir(), "nri.sock")
	runtime := startRuntime(t, socket)
	defer runtime.Stop()
	r := &recorder{}
	t.Run("", func(t *testing.T) {
		registered(t, runtime, start(t, socket, r))
		assert.Equal(t, []string{"synchronize p"}, r.take())
		assert.Equal(t, map[string][]imagevolume.Container{
			"p": {{
				ID: "c", Name: "ctr", Mounts: map[string]string{"/etc/hosts": "/hosts"},
				Natives: []imagevolume.Native{{MountPath: "/n", HostPath: "/s/overlay/l/merged", ImageID: imageID}},
			}},
		}, r.containers)

		ctx := t.Context()
		require.NoError(t, runtime.RunPodSandbox(ctx, &adaptation.RunPodSandboxRequest{Pod: pod}))
		_, err := runtime.CreateContainer(ctx, &adaptation.CreateContainerRequest{Pod: pod, Container: container})
		require.NoError(t, err)
		_, err = runtime.StopContainer(ctx, &adaptation.StopContainerRequest{Pod: pod, Container: container})
		require.NoError(t, err)
		require.NoError(t, runtime.RemoveContainer(ctx, &adaptation.RemoveContainerRequest{Pod: pod, Container: container}))
		require.NoError(t, runtime.RemovePodSandbox(ctx, &adaptation.RemovePodSandboxRequest{Pod: pod}))
		assert.Equal(t, []string{"run p", "create p/c", "end p/c", "end p/c", "remove p"}, r.take())
		assert.Equal(t, imagevolume.Pod{ID: "p", Namespace: "ns", Name: "pod", Annotations: pod.GetAnnotations(), UserNS: "/user"}, r.pod)
		assert.Equal(t, r.containers["p"][0], r.container)

		for _, volumes := range []string{"", "null", "[]", "{", `[{"image":"` + imageID + `"}]`} {
			c := &api.Container{Id: "c", Annotations: map[string]string{"io.kubernetes.cri-o.Volumes": volumes}}
			_, err := runtime.CreateContainer(ctx, &adaptation.CreateContainerRequest{Pod: pod, Container: c})
			require.NoError(t, err)
			assert.Empty(t, r.container.Natives, volumes)
		}
	})
}

func TestAdjustment(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "nri.sock")
	runtime := startRuntime(t, socket)
	defer runtime.Stop()
	r := &recorder{}
	registered(t, runtime, start(t, socket, r))
	create := func(annotations map[string]string) (*api.ContainerAdjustment, error) {
		c := &api.Container{Id: "c", PodSandboxId: "p", Annotations: annotations}
		answer, err := runtime.CreateContainer(t.Context(), &adaptation.CreateContainerRequest{Pod: pod, Container: c})
		return answer.GetAdjust(), err
	}
	volume := imagevolume.Given{
		Volume: request.Volume{Sources: []request.Source{{Image: "reg/a:1"}}, MountPath: "/a"},
		From:   []imagevolume.Image{{ID: "id", Digest: "sha256:d"}},
		Mount:  imagevolume.Mount{Source: "/mounts/id", Destination: "/a", Options: []string{"bind", "ro"}},
	}
	const report = `[{"mountPath":"/a","image":"reg/a:1","imageID":"id","digest":"sha256:d"}]`
	forged := map[string]string{nriplugin.ReportAnnotation: "forged"}

	r.given = []imagevolume.Given{volume}
	for _, annotations := range []map[string]string{nil, forged} {
		adjustment, err := create(annotations)
		require.NoError(t, err)
		require.Len(t, adjustment.GetMounts(), 1)
		assert.Equal(t, "bind", adjustment.GetMounts()[0].GetType())
		assert.Equal(t, "/mounts/id", adjustment.GetMounts()[0].GetSource())
		assert.Equal(t, "/a", adjustment.GetMounts()[0].GetDestination())
		assert.Equal(t, []string{"bind", "ro"}, adjustment.GetMounts()[0].GetOptions())
		assert.JSONEq(t, report, adjustment.GetAnnotations()[nriplugin.ReportAnnotation])
		assert.Len(t, adjustment.GetAnnotations(), 1, "a removal might be carried out after it")
	}

	volume.Sources = append(volume.Sources, request.Source{Image: "reg/b:1", MediaTypes: []string{"*tar*"}, SubPath: "s"})
	volume.From = append(volume.From, imagevolume.Image{ID: "id2", Digest: "sha256:d2"})
	r.given = []imagevolume.Given{volume}
	adjustment, err := create(nil)
	require.NoError(t, err)
	assert.JSONEq(t, `[{"mountPath":"/a","images":[{"image":"reg/a:1","imageID":"id","digest":"sha256:d"},`+
		`{"image":"reg/b:1","imageID":"id2","digest":"sha256:d2","mediaTypes":["*tar*"],"subPath":"s"}]}]`,
		adjustment.GetAnnotations()[nriplugin.ReportAnnotation])

	r.given = nil
	adjustment, err = create(forged)
	require.NoError(t, err)
	assert.Contains(t, adjustment.GetAnnotations(), api.MarkForRemoval(nriplugin.ReportAnnotation))
	assert.Empty(t, adjustment.GetMounts())
	adjustment, err = create(nil)
	require.NoError(t, err)
	assert.Empty(t, adjustment.GetAnnotations())

	r.err = errors.New("image volume /a: pulling reg/a:1; will be tried again")
	_, err = create(nil)
	require.ErrorContains(t, err, r.err.Error())
}

// A handler that is held up answers before the runtime gives it up, and the
// plugin stays registered.
func TestAnswersInTime(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "nri.sock")
	runtime := startRuntime(t, socket)
	defer runtime.Stop()
	r := &recorder{held: make(chan struct{})}
	p := start(t, socket, r)
	registered(t, runtime, p)
	create := func() error {
		_, err := runtime.CreateContainer(t.Context(), &adaptation.CreateContainerRequest{Pod: pod, Container: container})
		return err
	}
	for range 2 {
		require.ErrorContains(t, create(), "ocihold is busy; will be tried again")
	}
	assert.True(t, p.Registered())
	close(r.held)
	require.NoError(t, create())
	assert.Equal(t, []string{"synchronize p", "create p/c", "create p/c", "create p/c"}, r.take(), "it was registered once")
}

// The plugin registers only once the runtime's process was looked at.
func TestAttach(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "nri.sock")
	runtime := startRuntime(t, socket)
	defer runtime.Stop()
	log := logrus.New()
	log.SetOutput(io.Discard)
	pids := make(chan int, 2)
	failed := false
	p := nriplugin.New(nriplugin.Options{Name: "ocihold", Index: "10", Socket: socket, Log: log, Attach: func(pid int) error {
		pids <- pid
		if !failed {
			failed = true
			return errors.New("no")
		}
		return nil
	}}, &recorder{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	registered(t, runtime, p)
	cancel()
	require.NoError(t, <-ended)
	for range 2 {
		assert.Equal(t, os.Getpid(), <-pids)
	}
}

// runtimeService is a runtime that takes registrations and then does nothing. It
// does not answer where it is silent.
type runtimeService struct {
	registered chan struct{}
	silent     bool
}

func (r runtimeService) RegisterPlugin(ctx context.Context, _ *api.RegisterPluginRequest) (*api.Empty, error) {
	r.registered <- struct{}{}
	if r.silent {
		<-ctx.Done()
	}
	return &api.Empty{}, nil
}

func (runtimeService) UpdateContainers(context.Context, *api.UpdateContainersRequest) (*api.UpdateContainersResponse, error) {
	return &api.UpdateContainersResponse{}, nil
}

// TestRegistersAgain lets a plugin meet a runtime that is not there, one that
// hangs up, one that goes away between registration and configuration, one that
// never configures, one that does but never answers the registration, and at last
// one that works.
func TestRegistersAgain(t *testing.T) {
	defer goleak.VerifyNone(t)
	socket := filepath.Join(t.TempDir(), "nri.sock")
	t.Run("", func(t *testing.T) {
		r := &recorder{}
		p := start(t, socket, r)
		listener, err := net.Listen("unix", socket)
		require.NoError(t, err)
		conn, err := listener.Accept()
		require.NoError(t, err)
		require.NoError(t, conn.Close())
		for _, does := range []string{"hangs up", "never configures", "configures and never answers"} {
			conn, err := listener.Accept()
			require.NoError(t, err)
			mux := multiplex.Multiplex(conn)
			serviceListener, err := mux.Listen(multiplex.RuntimeServiceConn)
			require.NoError(t, err)
			server, err := ttrpc.NewServer()
			require.NoError(t, err)
			service := runtimeService{make(chan struct{}, 1), does == "configures and never answers"}
			api.RegisterRuntimeService(server, service)
			served := make(chan error, 1)
			go func() { served <- server.Serve(t.Context(), serviceListener) }()
			<-service.registered
			switch does {
			case "hangs up":
				require.NoError(t, mux.Close())
			case "configures and never answers":
				conn, err := mux.Open(multiplex.PluginServiceConn)
				require.NoError(t, err)
				client := ttrpc.NewClient(conn)
				defer func() { _ = client.Close() }()
				_, err = api.NewPluginClient(client).Configure(t.Context(), &api.ConfigureRequest{})
				require.NoError(t, err)
			}
			defer func() {
				_ = server.Close()
				_ = mux.Close()
				require.ErrorIs(t, <-served, ttrpc.ErrServerClosed)
			}()
			assert.False(t, p.Registered())
		}
		require.NoError(t, listener.Close())

		runtime := startRuntime(t, socket)
		t.Cleanup(runtime.Stop)
		require.Eventually(t, p.Registered, 20*time.Second, 10*time.Millisecond)
		assert.Equal(t, []string{"synchronize p"}, r.take())
	})
}
