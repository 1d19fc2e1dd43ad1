package realnode

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// callLimit bounds a call to CRI-O whose context has no deadline. It is far over
// CRI-O's own time-outs, so that those are seen.
const callLimit = 3 * time.Minute

// dial connects to CRI-O and, once it is used, to ocihold's ImageService.
func (n *Node) dial() (err error) {
	if n.conn, err = dial(n.paths.crioSocket()); err == nil && !n.state.WithoutOcihold {
		n.images, err = dial(n.paths.imageSocket())
	}
	return err
}

func dial(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, MaxDelay: 200 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithUnaryInterceptor(limitCalls))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", socket, err)
	}
	return conn, nil
}

func limitCalls(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callLimit)
		defer cancel()
	}
	return invoke(ctx, method, req, reply, conn, opts...)
}

// Runtime is CRI-O's RuntimeService.
func (n *Node) Runtime() cri.RuntimeServiceClient { return cri.NewRuntimeServiceClient(n.conn) }

// Images is CRI-O's ImageService.
func (n *Node) Images() cri.ImageServiceClient { return cri.NewImageServiceClient(n.conn) }

// OciholdImages is ocihold's ImageService.
func (n *Node) OciholdImages() cri.ImageServiceClient { return cri.NewImageServiceClient(n.images) }

// OciholdRuntime is CRI-O's RuntimeService as ocihold passes it on.
func (n *Node) OciholdRuntime() cri.RuntimeServiceClient {
	return cri.NewRuntimeServiceClient(n.images)
}

// ImageSocket is the socket of ocihold's ImageService.
func (n *Node) ImageSocket() string { return n.paths.imageSocket() }

// Pull makes CRI-O pull an image by its full name and returns the reference
// that CRI-O gives for it.
func (n *Node) Pull(ctx context.Context, image string) (string, error) {
	resp, err := n.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image}})
	if err != nil {
		return "", fmt.Errorf("pull %s by CRI-O: %w", image, err)
	}
	return resp.GetImageRef(), nil
}

// crioReady tells whether CRI-O answers and can run pods.
func (n *Node) crioReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	resp, err := n.Runtime().Status(ctx, &cri.StatusRequest{})
	if err != nil {
		return err
	}
	for _, c := range resp.GetStatus().GetConditions() {
		if c.GetType() == cri.RuntimeReady && !c.GetStatus() {
			return errors.New("runtime not ready: " + c.GetMessage())
		}
	}
	return nil
}

// removePods stops and removes every pod, without grace.
func (n *Node) removePods(ctx context.Context) error {
	rt := n.Runtime()
	containers, err := rt.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return fmt.Errorf("list containers: %w", err)
	}
	var errs []error
	for _, c := range containers.GetContainers() {
		_, err := rt.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: c.GetId(), Timeout: 0})
		errs = append(errs, err)
	}
	pods, err := rt.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	for _, p := range pods.GetItems() {
		_, err := rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.GetId()})
		errs = append(errs, err)
		_, err = rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.GetId()})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
