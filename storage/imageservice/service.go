package imageservice

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"sync/atomic"

	"github.com/bmatcuk/doublestar/v4"
	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
)

// DefaultRoot is the name of CRI-O's own root among the roots.
const DefaultRoot = "default"

// Options say what a service works on.
type Options struct {
	// Roots are CRI-O's own root, by the name of DefaultRoot, and those of handlers. Required.
	Roots *storage.Roots
	// CRIO is a connection to CRI-O's socket, as [Dial] makes it. Required.
	CRIO *grpc.ClientConn
	// Handlers are the known handlers by name: those with a root of their own, and CRI-O's others. DefaultRoot may be
	// among them to say more about the default root.
	Handlers map[string]Handler
	// Routes are tried in this order.
	Routes []Route
	// PolicyDir is CRI-O's signature_policy_dir: NAMESPACE.json there is the signature policy for pulls for pods of that
	// namespace. Empty means none.
	PolicyDir string
	// AuthDir is CRI-O's namespaced_auth_dir, where its credential provider leaves an auth file for the next pull of an
	// image for a pod of a namespace. Empty means none.
	AuthDir string
	// MayPull, if not nil, is asked before a pull into a root other than the default; its error refuses the pull.
	MayPull func(ctx context.Context, root string) error
	// VolumeUsers, if not nil, returns what says who has an image as a volume that CRI-O does not know of. It is asked
	// before anything is removed.
	VolumeUsers func(ctx context.Context) (func(imageID string) []string, error)
	// Pinned are CRI-O's pinned_images patterns and its pause image: images that kubelet's garbage collection is to
	// leave alone.
	Pinned []string
	// ReportRuntimeHandler fills ImageSpec.runtime_handler in answers. kubelet then takes images in use for unused, so
	// it is for other clients.
	ReportRuntimeHandler bool
	// Log hears of bad records and of answers that had to do without CRI-O. Required.
	Log logrus.FieldLogger
}

// Handler is what the service knows of a handler.
type Handler struct {
	// Root is the root of its images; empty means DefaultRoot.
	Root string
	// AllowAnnotation lets pods choose it by annotation.
	AllowAnnotation bool
	// CRIOPulls leaves pulls for it to CRI-O. Only for handlers in the default root.
	CRIOPulls bool
}

// Route sends images to a handler.
type Route struct {
	// Image is a pattern, as [doublestar.Match] has them, for the whole normalized name, tag or digest included.
	Image string
	// Handler is one of the known handlers.
	Handler string
}

// Service is the ImageService. Its methods may be called from several goroutines.
type Service struct {
	cri.UnsafeImageServiceServer

	roots   *storage.Roots
	chooser atomic.Pointer[chooser]
	crio    *grpc.ClientConn
	images  cri.ImageServiceClient
	policy  string
	authDir string
	mayPull func(ctx context.Context, root string) error
	pinned  []string
	report  bool

	volumeUsers func(ctx context.Context) (func(imageID string) []string, error)

	log logrus.FieldLogger
	// faults are those of lists, unread those of ImageFsInfo.
	faults, unread faults
}

var _ cri.ImageServiceServer = (*Service)(nil)

// New returns a service. It returns an error where a handler's root or a route's handler is not known, and for a pattern
// that is none.
func New(opt Options) (*Service, error) {
	s := &Service{
		roots:   opt.Roots,
		crio:    opt.CRIO,
		images:  cri.NewImageServiceClient(opt.CRIO),
		policy:  opt.PolicyDir,
		authDir: opt.AuthDir,
		mayPull: opt.MayPull,
		pinned:  opt.Pinned,
		report:  opt.ReportRuntimeHandler,
		log:     opt.Log,

		volumeUsers: opt.VolumeUsers,
	}
	return s, s.Choose(opt.Handlers, opt.Routes)
}

// Choose has calls from now on choose among these handlers, by these routes. It returns an error, and changes nothing,
// where a handler's root or a route's handler is not known, and for a pattern that is none.
func (s *Service) Choose(known map[string]Handler, routes []Route) error {
	handlers := map[string]Handler{DefaultRoot: {}}
	maps.Copy(handlers, known)
	names := s.roots.Names()
	for name, h := range handlers {
		if !slices.Contains(names, h.root()) {
			return fmt.Errorf("choose among handlers: handler %q: there is no root %q", name, h.root())
		}
	}
	c := &chooser{handlers: handlers, routes: routes}
	for _, r := range routes {
		if _, err := c.known(r.Handler); err != nil {
			return fmt.Errorf("choose among handlers: route %q: %w", r.Image, err)
		}
		if !doublestar.ValidatePattern(r.Image) {
			return fmt.Errorf("choose among handlers: route %q: %w", r.Image, doublestar.ErrBadPattern)
		}
	}
	s.chooser.Store(c)
	return nil
}

// Serve answers on listener, which it closes, until ctx ends; then it cuts off what is under way, and returns when that
// has ended.
func (s *Service) Serve(ctx context.Context, listener net.Listener) error {
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(math.MaxInt32),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.UnknownServiceHandler(s.forward),
		grpc.WaitForHandlers(true),
	)
	cri.RegisterImageServiceServer(server, s)
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		server.Stop()
	})
	err := server.Serve(listener)
	if !stop() {
		<-stopped
	}
	if err != nil {
		return fmt.Errorf("serve images: %w", err)
	}
	return nil
}
