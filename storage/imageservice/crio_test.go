package imageservice_test

import (
	"cmp"
	"context"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// crio is a CRI-O as far as forwarding goes: it says what it was asked.
type crio struct {
	cri.UnimplementedRuntimeServiceServer
	cri.UnimplementedImageServiceServer

	socket string
	server *grpc.Server

	mu         sync.Mutex
	containers []*cri.Container
	volumes    map[string]string // image id by container
	images     []*cri.Image      // by names, which are in RepoTags
	pulled     []*cri.PullImageRequest
	pullsID    string // of the image that it pulls; "pulled-by-crio" where empty
	removed    []string
}

func newCRIO(t *testing.T, socket string) *crio {
	t.Helper()
	c := &crio{socket: socket, volumes: make(map[string]string)}
	c.start(t)
	t.Cleanup(func() { c.server.Stop() })
	return c
}

func (c *crio) start(t *testing.T) {
	t.Helper()
	_ = os.Remove(c.socket)
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", c.socket)
	require.NoError(t, err)
	c.server = grpc.NewServer(grpc.MaxRecvMsgSize(1<<30), grpc.WaitForHandlers(true))
	cri.RegisterRuntimeServiceServer(c.server, c)
	cri.RegisterImageServiceServer(c.server, c)
	server := c.server
	go func() { _ = server.Serve(listener) }()
}

// change changes c while it serves.
func (c *crio) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

// Version shows what arrived: metadata, deadline, size.
func (c *crio) Version(ctx context.Context, req *cri.VersionRequest) (*cri.VersionResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	if len(md["wait"]) > 0 {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if len(md["fail"]) > 0 {
		_ = grpc.SetTrailer(ctx, metadata.Pairs("why", md["fail"][0]))
		failure, err := status.New(codes.ResourceExhausted, md["fail"][0]).WithDetails(&cri.VersionRequest{Version: "detail"})
		if err != nil {
			return nil, err
		}
		return nil, failure.Err()
	}
	if err := grpc.SetHeader(ctx, metadata.Pairs("answer", strings.Join(md["question"], ","))); err != nil {
		return nil, err
	}
	deadline := "none"
	if _, ok := ctx.Deadline(); ok {
		deadline = "set"
	}
	return &cri.VersionResponse{Version: req.GetVersion(), RuntimeVersion: deadline, RuntimeName: md["content-type"][0]}, nil
}

func (c *crio) GetContainerEvents(_ *cri.GetEventsRequest, stream grpc.ServerStreamingServer[cri.ContainerEventResponse]) error {
	for _, id := range []string{"a", "b", "c"} {
		if err := stream.Send(&cri.ContainerEventResponse{ContainerId: id}); err != nil {
			return err
		}
	}
	return status.Error(codes.Aborted, "no more events")
}

func (c *crio) ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &cri.ListContainersResponse{Containers: c.containers}, nil
}

func (c *crio) ContainerStatus(_ context.Context, req *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	result := &cri.ContainerStatus{}
	if image, ok := c.volumes[req.GetContainerId()]; ok {
		result.Mounts = []*cri.Mount{{ContainerPath: "/v", Image: &cri.ImageSpec{Image: image}}}
	}
	return &cri.ContainerStatusResponse{Status: result}, nil
}

func (c *crio) ListImages(context.Context, *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &cri.ListImagesResponse{Images: c.images}, nil
}

func (c *crio) ImageStatus(_ context.Context, req *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, image := range c.images {
		for _, name := range append(image.GetRepoTags(), image.GetId()) {
			if name == req.GetImage().GetImage() {
				return &cri.ImageStatusResponse{Image: image}, nil
			}
		}
	}
	return &cri.ImageStatusResponse{}, nil
}

func (c *crio) PullImage(_ context.Context, req *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pulled = append(c.pulled, req)
	c.images = append(c.images, &cri.Image{Id: cmp.Or(c.pullsID, "pulled-by-crio"), RepoTags: []string{"repo@sha256:digest"}, Size: 1})
	return &cri.PullImageResponse{ImageRef: "repo@sha256:digest"}, nil
}

func (c *crio) RemoveImage(_ context.Context, req *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.removed = append(c.removed, req.GetImage().GetImage())
	return &cri.RemoveImageResponse{}, nil
}

// contextWithTimeout is the test's with a time limit, and a key for Version.
func contextWithTimeout(t *testing.T, key string, limit time.Duration) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), key, "yes"), limit)
}
