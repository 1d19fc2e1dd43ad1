package cli

import (
	"context"
	"time"

	"github.com/sirupsen/logrus"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/imagevolume"
)

const (
	// sandboxesEvery is how often CRI-O's sandboxes are compared with those that it told of.
	sandboxesEvery = 5 * time.Second
	// sandboxesLimit is how long CRI-O may take to list them.
	sandboxesLimit = 10 * time.Second
)

// compareSandboxes has manager forget, until ctx ends, sandboxes that CRI-O has
// no more and of whose end it told nothing.
func compareSandboxes(ctx context.Context, crio cri.RuntimeServiceClient, manager *imagevolume.Manager, log logrus.FieldLogger) error {
	list := func(ctx context.Context) (map[string]bool, error) {
		ctx, cancel := context.WithTimeout(ctx, sandboxesLimit)
		defer cancel()
		resp, err := crio.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		listed := map[string]bool{}
		for _, s := range resp.GetItems() {
			listed[s.GetId()] = true
		}
		return listed, err
	}
	ticker := time.NewTicker(sandboxesEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if err := manager.CompareListed(ctx, list); err != nil {
			log.WithError(err).Debug("sandboxes are not compared with CRI-O's")
		}
	}
}
