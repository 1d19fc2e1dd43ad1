package realkubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/ocihold/ocihold/test/realnode"
)

// Player makes recorded calls anew, where kubelet would make them.
type Player struct{ services map[string]*grpc.ClientConn }

// NewPlayer returns a player for a node, until the test ends.
func NewPlayer(t *testing.T, n *realnode.Node) *Player {
	t.Helper()
	p := &Player{services: make(map[string]*grpc.ClientConn)}
	for service, socket := range map[string]string{
		"RuntimeService": filepath.Join(n.Dir(), "run", "crio.sock"), "ImageService": n.ImageSocket(),
	} {
		conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()) })
		p.services[service] = conn
	}
	return p
}

// Play makes a call and returns it with its answer.
func (p *Player) Play(ctx context.Context, call Call) (Call, error) {
	done := Call{Method: call.Method, Request: call.Request}
	service, name, _ := strings.Cut(call.Method, "/")
	desc, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("runtime.v1." + service + "." + name))
	if err != nil {
		return done, fmt.Errorf("play %s: %w", call.Method, err)
	}
	method := desc.(protoreflect.MethodDescriptor)
	request, err := message(method.Input())
	if err != nil {
		return done, err
	}
	reply, err := message(method.Output())
	if err != nil {
		return done, err
	}
	content, err := json.Marshal(call.Request)
	if err != nil {
		return done, err
	}
	if err := protojson.Unmarshal(content, request); err != nil {
		return done, fmt.Errorf("read the request of %s: %w", call.Method, err)
	}
	if err := p.services[service].Invoke(ctx, "/runtime.v1."+call.Method, request, reply); err != nil {
		done.Error = errorText(err)
		return done, nil
	}
	done.Answer, err = plain(reply)
	return done, err
}

// errorText is a call's error as Call has it.
func errorText(err error) string {
	s := status.Convert(err)
	return s.Code().String() + ": " + s.Message()
}
