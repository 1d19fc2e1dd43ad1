package nriplugin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/request"
)

// ReportAnnotation is set on each container that was given volumes, and says
// which: a JSON list. It is for people. A pod can write it too, so nothing
// reads it back, and what a pod wrote there is taken away.
const ReportAnnotation = "ocihold.dev/volumes"

const (
	backOffMin = 100 * time.Millisecond
	backOffMax = time.Second
	// registrationTimeout is how long a runtime may take to accept the plugin.
	registrationTimeout = stub.DefaultRegistrationTimeout
)

// Volumes is what happens behind the events; *imagevolume.Manager is one. No
// method may wait.
type Volumes interface {
	RunPod(imagevolume.Pod)
	CreateContainer(imagevolume.Pod, imagevolume.Container) ([]imagevolume.Given, error)
	EndContainer(podID, containerID string)
	RemovePod(podID string)
	Synchronize(pods []imagevolume.Pod, containers map[string][]imagevolume.Container)
}

var _ Volumes = (*imagevolume.Manager)(nil)

// Options say how the plugin registers.
type Options struct {
	// Name and Index are the plugin's name and its two-digit place among
	// other plugins.
	Name, Index string
	// Socket is the runtime's NRI socket.
	Socket string
	// Attach, if not nil, is called with the runtime's process id before the
	// plugin registers with it. Its error puts that off.
	Attach func(pid int) error
	// HardenNative gives the mounts of native image volumes the options nosuid,
	// nodev and, unless the pod has programs run (request.NativeExec), noexec.
	HardenNative bool
	Log          logrus.FieldLogger
}

// Plugin is an NRI plugin.
type Plugin struct {
	options    Options
	volumes    Volumes
	registered atomic.Bool
}

// New returns a plugin that tells volumes what happens.
func New(options Options, volumes Volumes) *Plugin {
	return &Plugin{options: options, volumes: volumes}
}

// Registered reports whether the plugin is connected and the runtime has asked
// it to synchronize.
func (p *Plugin) Registered() bool { return p.registered.Load() }

// Run keeps the plugin registered until ctx ends. A runtime that is not there,
// refuses or goes away is tried again with a growing delay of about a second at
// most. The log has each fault once.
func (p *Plugin) Run(ctx context.Context) error {
	delay := backOffMin
	told := ""
	for ctx.Err() == nil {
		served, err := p.serve(ctx)
		if served {
			delay, told = backOffMin, ""
		}
		if ctx.Err() == nil && err.Error() != told {
			told = err.Error()
			p.options.Log.WithError(err).WithField("socket", p.options.Socket).Warn("not registered with the container runtime; trying again")
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay + rand.N(delay/4)): //nolint:gosec // spread, not secret
		}
		delay = min(2*delay, backOffMax)
	}
	return nil
}

// serve holds one connection until it ends. served says that it was more than
// an attempt.
func (p *Plugin) serve(ctx context.Context) (served bool, err error) {
	dialer := net.Dialer{Timeout: registrationTimeout}
	conn, err := dialer.DialContext(ctx, "unix", p.options.Socket)
	if err != nil {
		return false, fmt.Errorf("connect to the container runtime: %w", err)
	}
	defer conn.Close()
	if p.options.Attach != nil {
		if err := attach(conn, p.options.Attach); err != nil {
			return false, err
		}
	}
	closed := make(chan struct{}, 1)
	accepted := make(chan struct{})
	h := &handlers{Plugin: p}
	s, err := stub.New(h,
		stub.WithPluginName(p.options.Name),
		stub.WithPluginIdx(p.options.Index),
		stub.WithConnection(conn),
		stub.WithLogger(logger{p.options.Log}),
		stub.WithTTRPCOptions([]ttrpc.ClientOpts{onSuccess(func() { close(accepted) })}, nil),
		stub.WithOnClose(func() {
			select {
			case closed <- struct{}{}:
			default:
			}
		}))
	if err != nil {
		return false, fmt.Errorf("make NRI plugin: %w", err)
	}
	h.timeout = s.RequestTimeout
	defer p.registered.Store(false)
	if err := begin(ctx, s, accepted, func() { conn.Close() }); err != nil {
		return false, fmt.Errorf("register with the container runtime: %w", err)
	}
	defer s.Wait()
	defer s.Stop()
	select {
	case <-ctx.Done():
		return true, nil
	case <-closed:
		return true, errors.New("the container runtime closed the connection")
	}
}

// attach calls do with the id of the process that listens at the other end.
func attach(conn net.Conn, do func(pid int) error) error {
	raw, err := conn.(*net.UnixConn).SyscallConn() //nolint:forcetypeassert // what "unix" gives
	if err != nil {
		return fmt.Errorf("find the container runtime's process: %w", err)
	}
	var peer *unix.Ucred
	var peerErr error
	err = raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(err, peerErr); err != nil {
		return fmt.Errorf("find the container runtime's process: %w", err)
	}
	if peer.Pid == 0 {
		return errors.New("the container runtime's process is not in this PID namespace: run ocihold in the host's")
	}
	if err := do(int(peer.Pid)); err != nil {
		return fmt.Errorf("prepare the container runtime's mounts: %w", err)
	}
	return nil
}

// onSuccess has done called after each call to the runtime that it answers well:
// the stub's only one is its registration.
func onSuccess(done func()) ttrpc.ClientOpts {
	return ttrpc.WithUnaryClientInterceptor(func(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response,
		_ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker,
	) error {
		err := invoke(ctx, req, resp)
		if err == nil {
			done()
		}
		return err
	})
}

// begin starts the stub. A runtime that has accepted the registration and goes away
// before it configures the plugin leaves the library waiting, for ever and with
// its lock held: then the connection is closed and the configuration that does
// not come is made up, which ends the wait. The library takes one configuration
// and keeps one more; whoever brings another waits for ever. So none is made up
// before the registration is accepted: closing the connection ends that.
func begin(ctx context.Context, s stub.Stub, accepted <-chan struct{}, hangUp func()) error {
	started := make(chan error, 1)
	go func() { started <- s.Start(ctx) }()
	var err error
	select {
	case err := <-started:
		return err
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(registrationTimeout):
		err = errors.New("it does not answer")
	}
	hangUp()
	var failed error
	select {
	case failed = <-started:
	case <-accepted:
		if waiting, ok := s.(interface {
			Configure(context.Context, *api.ConfigureRequest) (*api.ConfigureResponse, error)
		}); ok {
			_, _ = waiting.Configure(ctx, &api.ConfigureRequest{})
		}
		failed = <-started
	}
	if failed == nil {
		s.Stop()
	}
	return err
}

// errBusy is the answer where there is none in time: the runtime would start the
// container without its volumes.
var errBusy = errors.New("ocihold is busy; will be tried again")

// handlers has the methods that NRI calls, and only those.
type handlers struct {
	*Plugin

	timeout func() time.Duration // how long the runtime waits for an answer
}

// within does what an event is for. It returns errBusy when most of the time is
// over that the runtime gives; what was begun goes on.
func (h *handlers) within(do func()) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	limit := h.timeout()
	if limit <= 0 { // a runtime that does not tell
		limit = stub.DefaultRequestTimeout
	}
	timer := time.NewTimer(limit * 3 / 4)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
		h.options.Log.Warn("an event of the container runtime is not dealt with in time")
		return errBusy
	}
}

var (
	_ stub.SynchronizeInterface     = (*handlers)(nil)
	_ stub.RunPodInterface          = (*handlers)(nil)
	_ stub.RemovePodInterface       = (*handlers)(nil)
	_ stub.CreateContainerInterface = (*handlers)(nil)
	_ stub.StopContainerInterface   = (*handlers)(nil)
	_ stub.RemoveContainerInterface = (*handlers)(nil)
)

// Synchronize takes over what the runtime has.
func (h *handlers) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	began := time.Now()
	all := make([]imagevolume.Pod, len(pods))
	for i, pod := range pods {
		all[i] = podOf(pod)
	}
	byPod := map[string][]imagevolume.Container{}
	for _, c := range containers {
		byPod[c.GetPodSandboxId()] = append(byPod[c.GetPodSandboxId()], containerOf(c))
	}
	// Only the answer to CreateContainer says more than that the event has come.
	_ = h.within(func() {
		h.volumes.Synchronize(all, byPod)
		h.registered.Store(true)
	})
	h.options.Log.WithFields(logrus.Fields{
		"pods": len(pods), "containers": len(containers), "took": time.Since(began),
	}).Info("synchronized with the container runtime")
	return nil, nil
}

// RunPodSandbox starts the pulls.
func (h *handlers) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	_ = h.within(func() { h.volumes.RunPod(podOf(pod)) })
	return nil
}

// CreateContainer injects the volumes, or refuses the container.
func (h *handlers) CreateContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	began := time.Now()
	native, err := h.native(pod, c)
	if err != nil {
		return nil, nil, err
	}
	var given []imagevolume.Given
	var refused error
	err = h.within(func() { given, refused = h.volumes.CreateContainer(podOf(pod), containerOf(c)) })
	if err != nil {
		return nil, nil, err
	}
	if refused != nil {
		return nil, nil, refused
	}
	adjustment, err := adjust(given, native, c.GetAnnotations())
	h.options.Log.WithFields(logrus.Fields{
		"container": c.GetId(), "volumes": len(given), "hardened": len(native), "took": time.Since(began),
	}).Debug("container is answered")
	if list := natives(c.GetAnnotations()); err == nil && len(given)+len(list) > 0 {
		h.options.Log.WithFields(logrus.Fields{
			"namespace": pod.GetNamespace(), "pod": pod.GetName(), "container": request.ContainerName(c.GetAnnotations()), "id": c.GetId(),
			"volumes": adjustment.GetAnnotations()[ReportAnnotation], "native": nativeReport(list),
		}).Info("container is given image volumes")
	}
	return adjustment, nil, err
}

// native returns the mounts of native image volumes as they are to be, where they
// are to be another way.
func (h *handlers) native(pod *api.PodSandbox, c *api.Container) ([]*api.Mount, error) {
	if !h.options.HardenNative {
		return nil, nil
	}
	mounts, unknown, err := hardened(pod, c)
	if len(unknown) > 0 {
		h.options.Log.WithFields(logrus.Fields{"container": c.GetId(), "mount_paths": unknown}).
			Warn("native image volumes stay without noexec, nosuid and nodev: CRI-O mounts them in another way")
	}
	return mounts, err
}

// StopContainer comes when a container is stopped and when it exits. The pod is
// not always told.
func (h *handlers) StopContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	_ = h.within(func() { h.volumes.EndContainer(c.GetPodSandboxId(), c.GetId()) })
	return nil, nil
}

// RemoveContainer comes when neither of those did, too.
func (h *handlers) RemoveContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) error {
	_ = h.within(func() { h.volumes.EndContainer(c.GetPodSandboxId(), c.GetId()) })
	return nil
}

// RemovePodSandbox lets go all that the pod held.
func (h *handlers) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	_ = h.within(func() { h.volumes.RemovePod(pod.GetId()) })
	return nil
}
