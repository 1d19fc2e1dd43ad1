package imageservice

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Users returns what tells, without asking again, who uses an image: CRI-O's containers, which it asks for, as their root
// file system or as an image volume, and whom Options.VolumeUsers knows. It returns an error where CRI-O or that does not
// answer.
func (s *Service) Users(ctx context.Context) (func(imageID string) ([]string, error), error) {
	runtime := cri.NewRuntimeServiceClient(s.crio)
	list, err := runtime.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask who uses it: %w", fromCRIO(s.crio, err))
	}
	found := make(map[string][]string)
	for _, c := range list.GetContainers() {
		used := map[string]struct{}{c.GetImageId(): {}, c.GetImageRef(): {}, c.GetImage().GetImage(): {}}
		// CRI-O lists no volumes.
		detail, err := runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: c.GetId()})
		switch {
		case status.Code(err) == codes.NotFound:
			continue // removed meanwhile
		case err != nil:
			return nil, fmt.Errorf("ask what container %s uses: %w", c.GetId(), fromCRIO(s.crio, err))
		}
		for _, m := range detail.GetStatus().GetMounts() {
			used[m.GetImage().GetImage()] = struct{}{}
		}
		who := fmt.Sprintf("container %s (%s/%s/%s)", c.GetId(), c.GetLabels()["io.kubernetes.pod.namespace"],
			c.GetLabels()["io.kubernetes.pod.name"], c.GetMetadata().GetName())
		for image := range used {
			if image != "" {
				found[image] = append(found[image], who)
			}
		}
	}
	volumes := func(string) []string { return nil }
	if s.volumeUsers != nil {
		if volumes, err = s.volumeUsers(ctx); err != nil {
			return nil, fmt.Errorf("ask who uses it: %w", err)
		}
	}
	return func(imageID string) ([]string, error) { return slices.Concat(found[imageID], volumes(imageID)), nil }, nil
}
